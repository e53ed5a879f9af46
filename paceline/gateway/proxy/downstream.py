"""The caller's connection for one request, and what waits to be written to it.

This module does not know where an answer comes from: ``Response``, which extends it, does.
"""

from __future__ import annotations

from typing import Final

from paceline.gateway.proxy.wake import Wake
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.http.body_writer import BodyWriter
from paceline.http.sse import KEEP_ALIVE, STREAM_HEADERS
from paceline.http.upstream import Headers

__all__ = ["Downstream"]

# bytes that may wait for the caller before the engine's connection is paused
_MAX_BACKLOG: Final = 64 * 1024
# engines' headers that are passed on to callers
_ANSWER_HEADERS: Final = frozenset(
    {
        b"content-type", b"retry-after", b"x-should-retry", b"x-paceline-ignored-fields",
        b"x-paceline-rewritten-messages", b"x-llm-d-request-dropped-reason",
    }
)  # fmt: skip
_STREAM_HEADERS: Final = tuple(
    (name.lower().encode(), value.encode()) for name, value in STREAM_HEADERS.items()
)


class Downstream:
    """Writes go out at once if the connection takes them; otherwise they wait for the
    request's task to flush them.

    Args:
        stream: the caller asked for events.
        wake: set when there is something to flush, or the caller is gone.
    """

    def __init__(self, incoming: IncomingRequest, *, stream: bool, wake: Wake, now: float) -> None:
        self._writer = incoming.writer
        self._incoming, self._stream, self._wake = incoming, stream, wake
        self._backlog = bytearray()
        # an earlier part is being sent to a slow caller
        self._flushing = False
        # the status was sent
        self.started = False
        # the whole answer was sent
        self.ended = False
        # the caller hung up
        self.gone = False
        # ticks since the last write, and the time of the first of them
        self._quiet_for = 0
        self._quiet_since = now

    def stream_head(self) -> tuple[Headers, Headers] | None:
        """Return the engine's headers for a stream that starts now, and the gateway's notes; None:
        no engine is answering."""
        return None

    def hold_back(self) -> None:
        """Pause the engine: too much waits for the caller."""

    @property
    def sees_hang_ups(self) -> bool:
        """Whether ``look`` detects that the caller is gone."""
        return self._writer is not None

    @property
    def num_waiting(self) -> int:
        """Bytes that wait to be written."""
        return len(self._backlog)

    def write(self, data: bytes) -> None:
        """Send a part to the caller, now or when its connection takes it."""
        writer = self._writer
        if (
            writer is not None
            and not self._backlog
            and not self._flushing
            and (writer.offer(data) if self.started else self._start_with(data, writer))
        ):
            self._quiet_for = 0
            return
        self._backlog += data
        if len(self._backlog) > _MAX_BACKLOG:
            self.hold_back()
        self._wake.set()

    def write_last(self, data: bytes) -> None:
        """Send the last part of a stream, and end it; if that cannot be done now, ``end`` does it
        later."""
        writer = self._writer
        if (
            writer is not None
            and self.started
            and not self._backlog
            and not self._flushing
            and self._finish_with(data, writer)
        ):
            self.ended = True
        else:
            self.write(data)

    def _finish_with(self, data: bytes, writer: BodyWriter) -> bool:
        # wake the task before a pipelined request starts on the connection: the task then runs
        # first, and gives back the request's reservations, unless it must wait for something else,
        # such as the store of rate limits
        self._wake.set()
        return writer.finish(data)

    def _start_with(self, data: bytes, writer: BodyWriter) -> bool:
        """Send head and first part in one write; False: not possible now."""
        found = self.stream_head() if self._stream else None
        if found is None:
            return False
        self.started = writer.start(
            200, [*self._kept(200, found[0]), *found[1], *self._incoming.begin()], data
        )
        return self.started

    def _kept(self, status: int, headers: Headers) -> Headers:
        """Keep the headers of an engine's answer that callers get."""
        kept = [header for header in headers if header[0] in _ANSWER_HEADERS]
        if self._stream and status == 200:
            kept += _STREAM_HEADERS
        return kept

    def tick(self, now: float, keep_alive: float) -> None:
        """Send a comment after ``keep_alive`` seconds without output (0.0: never), so that proxies
        do not take the stream for dead."""
        self.look()
        if not self._quiet_for:
            self._quiet_since = now
        self._quiet_for += 1
        if self._stream and keep_alive and now - self._quiet_since >= keep_alive:
            self._quiet_since = now
            self.write(KEEP_ALIVE)

    def look(self) -> None:
        if self._writer is not None and self._writer.is_gone:
            self.hung_up()

    def hung_up(self) -> None:
        """Note that the caller hung up; after a complete answer that does not matter."""
        if not self.ended:
            self.gone = True
            self._wake.set()

    async def send_head(self, status: int, headers: Headers, told: Headers) -> None:
        """Send the head: ``told``, and the engine's headers that callers get."""
        self.started = True
        found = [*self._kept(status, headers), *told]
        await self._incoming.send(
            {"type": "http.response.start", "status": status, "headers": found}
        )

    async def send_whole(self, status: int, headers: Headers, told: Headers, body: bytes) -> None:
        """Send an answer that is not a stream; arguments as for ``send_head``."""
        writer = self._writer
        if writer is not None and not self._stream:
            found = [*self._kept(status, headers), *told, *self._incoming.begin()]
            if writer.whole(status, found, body):
                self.started = True
                return
        await self.send_head(status, headers, [*told, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def send_waiting(self) -> None:
        """Send what waits; returns once a slow caller has read enough, or hung up."""
        data, self._backlog = bytes(self._backlog), bytearray()
        self._quiet_for = 0
        self._flushing = True
        try:
            await self._incoming.send(
                {"type": "http.response.body", "body": data, "more_body": True}
            )
        finally:
            self._flushing = False

    async def end(self, body: bytes = b"") -> None:
        """Send the rest of an answer and end it, unless it has ended."""
        if self.ended:
            return
        self.ended = True
        await self._incoming.send({"type": "http.response.body", "body": body, "more_body": False})
