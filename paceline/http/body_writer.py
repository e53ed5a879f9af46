"""Writing of an answer past ``send``: the bytes are the same, and no turn of the event loop or call
of a coroutine is needed for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

__all__ = ["BODY_WRITER", "BodyWriter"]

# a scope's extension that holds its BodyWriter
BODY_WRITER: Final = "paceline.body_writer"


class BodyWriter:
    """Writes one answer, or parts of its body, and reads its request, as the scope's ``send`` and
    ``receive`` do, but without an await."""

    __slots__ = ("_cycle", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        # bytes of the body written so
        self.num_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether a part can be written now: the answer has begun and is not over, the caller is
        connected, and earlier parts do not wait for a slow reader."""
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not cycle.response_started
            or not cycle.chunked_encoding
        )

    @property
    def is_gone(self) -> bool:
        """Whether the caller has hung up, as far as its connection was read."""
        return self._cycle.disconnected

    def take_body(self) -> bytes | None:
        """Return the request's body, as ``receive`` would, if all of it has come; otherwise None.
        Called once, before ``receive``."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def write(self, body: bytes) -> None:
        """Write one part, not empty, while ``is_ready``."""
        self.num_bytes += len(body)
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def offer(self, body: bytes) -> bool:
        """``write`` if it ``is_ready``; return whether it was."""
        cycle = self._cycle
        # as in ``is_ready``, whose call would cost more: this is done for every chunk
        if (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not cycle.response_started
            or not cycle.chunked_encoding
        ):
            return False
        size = len(body)
        self.num_bytes += size
        cycle.transport.write(b"%x\r\n%b\r\n" % (size, body))
        return True

    def finish(self, body: bytes) -> bool:
        """Write the last part of a chunked answer, not empty, and its end, if it ``is_ready``;
        return whether it was."""
        assert body, "a chunk of nothing is an end by itself"
        if not self.is_ready:
            return False
        self.num_bytes += len(body)
        self._cycle.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        self._complete()
        return True

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write the head of a chunked answer, and its first part; return False, with nothing
        written, if the connection takes nothing now or the head was sent already.

        Args:
            headers: names in lower case; none of them frames the body.

        Raises:
            ValueError: a value has more than one line.
        """
        if not self._can_start:
            return False
        cycle = self._cycle
        head = self._head(status, headers)
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        self.num_bytes += len(body)
        cycle.transport.write(
            b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (head, len(body), body)
        )
        return True

    def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a complete answer that is not chunked; otherwise as ``start``."""
        if not self._can_start:
            return False
        cycle = self._cycle
        head = self._head(status, headers)
        cycle.response_started, cycle.chunked_encoding = True, False
        cycle.waiting_for_100_continue = False
        self.num_bytes += len(body)
        cycle.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()
        return True

    def _complete(self) -> None:
        """Mark the answer as completely written."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    @property
    def _can_start(self) -> bool:
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_started
            or cycle.scope["method"] == "HEAD"
        )

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the head without the header that frames the body."""
        cycle = self._cycle
        lines, num = b"".join([b"%b: %b\r\n" % header for header in headers]), len(headers)
        if lines.count(b"\n") != num or lines.count(b"\r") != num or lines.count(b"\0"):
            raise ValueError(f"a header's value is one line, got {lines[:300]!r}")
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines += b"connection: close\r\n"
        return STATUS_LINE[status] + lines
