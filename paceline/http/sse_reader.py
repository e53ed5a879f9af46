"""Reading server-sent events: bytes in, events out, wherever they were cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_EVENT_BYTES", "SseEvents", "payload_of"]

# of one event; who sends more without an end sends no stream
MAX_EVENT_BYTES: Final = 1 << 20
# more than any ping has
_LONG_BYTES: Final = 256


@dataclass(slots=True, eq=False)
class SseEvents:
    """Cuts a stream into events, wherever its parts were cut."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        if b"\r" in data:
            # JSON has no bare carriage returns: these are line ends
            data = data.replace(b"\r", b"")
        if not self._rest and data.endswith(b"\n\n") and data.count(b"\n\n") == 1:
            return [data[:-2]]
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [event.lstrip(b"\n") for event in events if event.strip(b"\n")]

    @property
    def is_between(self) -> bool:
        """Whether nothing of an event is kept whose end has not come."""
        return not self._rest

    @property
    def is_in_long(self) -> bool:
        """Whether what is kept is of an event with data, and more than a ping has."""
        rest = self._rest
        if len(rest) <= _LONG_BYTES:
            return False
        return rest.startswith(b"data:") or b"\ndata:" in rest[:_LONG_BYTES]

    @property
    def too_long(self) -> bool:
        return len(self._rest) > MAX_EVENT_BYTES

    def clear(self) -> None:
        self._rest = b""


def payload_of(event: bytes) -> bytes | None:
    """Its data; None: it has none, such as a comment."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    found = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(found) if found else None
