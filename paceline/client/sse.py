"""Server-sent events from bytes that are cut anywhere (WHATWG HTML, section 9.2.6). Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["SseError", "SseParser"]

_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


class SseError(ValueError):
    """The stream holds an event that is too long, or is not UTF-8."""


class SseParser:
    """Bytes in, the data of whole events out. Names of events, ids and comments are passed over.

    Args:
        max_event_bytes: of one event, its line ends and comments within it included.
    """

    __slots__ = ("_begun", "_bytes", "_data", "_max", "_pending", "_skip_lf")

    def __init__(self, max_event_bytes: int) -> None:
        self._max = max_event_bytes
        # pieces of a line whose end has not come
        self._pending: list[bytes] = []
        self._data: list[bytes] = []
        # of the event at hand
        self._bytes = 0
        # a line ended in CR, so that an LF right behind it belongs to it
        self._skip_lf = False
        self._begun = False

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that end in ``data``. Raises SseError; use the parser no more."""
        if not data:
            return []
        if self._skip_lf:
            data = data.removeprefix(b"\n")
        out: list[str] = []
        start = 0
        for match in _LINE_END.finditer(data):
            self._count(match.end() - start)
            self._pending.append(data[start : match.start()])
            line = b"".join(self._pending)
            self._pending.clear()
            start = match.end()
            self._line(line, out)
        self._skip_lf = data.endswith(b"\r")
        if start < len(data):
            self._count(len(data) - start)
            self._pending.append(data[start:])
        return out

    def _count(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        if self._bytes > self._max:
            raise SseError(f"an event has more than {self._max} bytes")

    def _line(self, line: bytes, out: list[str]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                try:
                    out.append(b"\n".join(self._data).decode())
                except UnicodeDecodeError:
                    raise SseError("an event is not UTF-8") from None
            self._data = []
            self._bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
