"""Parsing of server-sent events: bytes in, events out, however they are split (WHATWG HTML 9.2.6).

An event without data, or with blank data, is a keep-alive: it has no content, and dropping it loses
none. Its name may still report that the server failed (``names_error``).
"""

from __future__ import annotations

from typing import Final

from paceline.wire import fast_paths

__all__ = ["MAX_EVENT_BYTES", "PINGS", "SseEvents", "name_of", "names_error", "payload_of"]

# most bytes of one event; a server that sends more without an end sends no stream
MAX_EVENT_BYTES: Final = 1 << 20
# names of events that keep a connection alive, with any data
PINGS: Final = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat"})
# as numbers, as a search for bytes in bytes takes several times as long
_LF: Final = ord("\n")
_CR: Final = ord("\r")
# more bytes than any ping has
_LONG_BYTES: Final = 256
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class SseEvents:
    """Splits a stream into events, however its parts were split.

    Args:
        max_bytes: of one event, with a byte for each of its line ends.
    """

    __slots__ = ("_after_cr", "_begun", "_is_fast", "_max", "_rest", "too_long")

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_bytes
        self._is_fast = fast_paths.are_on()
        self.clear()

    def clear(self) -> None:
        """Start another stream."""
        self._rest = bytearray()
        self._begun = self._after_cr = False
        # an event exceeded the limit: the events before it are good, and no more follow
        self.too_long = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that end in ``data``: their lines, joined by line feeds."""
        if not self._begun:
            data = self._begin(data)
        if self._after_cr or _CR in data:
            data = self._with_line_feeds(data)
        rest = self._rest
        if not rest:
            end = len(data) - 2 if self._is_fast and not self.too_long else 0
            if 0 < end < self._max - 1 and data.find(b"\n\n") == end and data[:1] != b"\n":
                # nearly every read brings one event
                return [data[:-2]]
            *events, last = data.split(b"\n\n")
        else:
            start = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", start) < 0:
                self.too_long = self.too_long or len(rest) > self._max
                return []
            *events, last = bytes(rest).split(b"\n\n")
        self._rest = bytearray(last.lstrip(b"\n"))
        return self._short(events)

    def _begin(self, data: bytes) -> bytes:
        """Return the first bytes, without a byte order mark."""
        data = bytes(self._rest) + data
        self._rest.clear()
        if len(data) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(data):
            self._rest += data
            return b""
        self._begun = True
        return data.removeprefix(_BYTE_ORDER_MARK)

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Normalize line ends: CR, LF or both, which may be split between two parts."""
        if not data:
            return data
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _short(self, events: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        if self.too_long:
            return found
        for event in events:
            event = event.lstrip(b"\n")
            if len(event) >= self._max:
                self.too_long = True
                return found
            if event:
                found.append(event)
        self.too_long = len(self._rest) > self._max
        return found

    @property
    def is_between(self) -> bool:
        """Whether no part of an incomplete event is kept."""
        return not self._rest

    @property
    def is_in_long(self) -> bool:
        """Whether the kept part is of an event with data, and longer than a ping."""
        rest = self._rest
        if len(rest) <= _LONG_BYTES:
            return False
        return rest.startswith(b"data:") or b"\ndata:" in rest[:_LONG_BYTES]


def payload_of(event: bytes) -> bytes | None:
    """Return an event's data, stripped; None without data, such as a comment or a keep-alive."""
    if event.startswith(b"data: ") and _LF not in event:
        return event[6:].strip() or None
    found = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(found).strip() or None


def name_of(event: bytes) -> bytes:
    """Return an event's name, empty if it has none."""
    if not event.startswith(b"event:") and b"\nevent:" not in event:
        return b""
    lines = event.split(b"\n")
    return [line[6:] for line in lines if line.startswith(b"event:")][-1].strip()


def names_error(name: bytes) -> bool:
    """Whether an event of this name reports an error, with any data."""
    return name.endswith(b"error")
