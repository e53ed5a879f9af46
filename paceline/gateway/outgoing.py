"""The caller's side of one request: its connection, and what waits to be written there."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from starlette.types import Scope, Send

from paceline.http.shortcut import BODY_WRITER, AnswerWriter
from paceline.http.sse import KEEP_ALIVE, STREAM_HEADERS
from paceline.http.upstream import Headers

__all__ = ["Outgoing", "Source"]

# waiting for the caller to read before the engine is read no further
_MAX_BACKLOG: Final = 64 * 1024
# of engines that callers get
_ANSWER_HEADERS: Final = frozenset(
    {
        b"content-type",
        b"retry-after",
        b"x-should-retry",
        b"x-paceline-ignored-fields",
        b"x-paceline-rewritten-messages",
        b"x-llm-d-request-dropped-reason",
    }
)
_STREAM_HEADERS: Final = tuple(
    (name.lower().encode(), value.encode()) for name, value in STREAM_HEADERS.items()
)


class Call(Protocol):
    """The exchange at the door that a request came with."""

    @property
    def scope(self) -> Scope: ...
    @property
    def send(self) -> Send: ...

    def begin(self) -> Headers:
        """The answer begins: what every one has among its headers. For who does not ``send`` it,
        which adds them by itself."""
        ...


class Source(Protocol):
    """Where what is written comes from."""

    def head(self) -> tuple[Headers, Headers] | None:
        """Of a stream that begins now: the engine's headers, and what callers are told beside them;
        None: no engine is at it."""
        ...

    def hold_back(self) -> None:
        """More waits than may: no more for now."""
        ...


class Outgoing:
    """What is written goes out in the call that wrote it, where the connection takes it; else it
    waits for the request's task to flush it.

    Args:
        stream: the caller asked for events.
        wake: set when there is something to flush, or the caller is gone.
    """

    def __init__(
        self,
        call: Call,
        *,
        stream: bool,
        wake: asyncio.Event,
        source: Source,
        now: float,
    ) -> None:
        self._writer: AnswerWriter | None = call.scope.get("extensions", {}).get(BODY_WRITER)
        self._call, self._source, self._stream, self._wake = call, source, stream, wake
        self._backlog = bytearray()
        # an earlier part is on its way, and waits for a caller who reads slowly
        self._flushing = False
        # the status is told
        self.started = False
        # all of the answer is out
        self.ended = False
        # the caller hung up
        self.gone = False
        # ticks since something was written, and when the first of them was
        self._quiet_for = 0
        self._quiet_since = now

    @property
    def sees_hang_ups(self) -> bool:
        """Whether ``look`` finds out that the caller is gone."""
        return self._writer is not None

    @property
    def num_waiting(self) -> int:
        """Bytes that were not written yet."""
        return len(self._backlog)

    def write(self, data: bytes) -> None:
        """To the caller, now or when its connection takes it."""
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
            self._source.hold_back()
        self._wake.set()

    def write_last(self, data: bytes) -> None:
        """What an answer in parts ends with. Where it cannot go out now, the end is left to
        ``end``."""
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

    def _finish_with(self, data: bytes, writer: AnswerWriter) -> bool:
        # before its connection begins with a request that was sent ahead: the task of this one
        # runs first, and its reservations are given back by then, unless it has to wait for more,
        # such as for where rate limits are kept
        self._wake.set()
        return writer.finish(data)

    def _start_with(self, data: bytes, writer: AnswerWriter) -> bool:
        """Head and first part in one; False: they go the usual way."""
        found = self._source.head() if self._stream else None
        if found is None:
            return False
        self.started = writer.start(
            200, [*self._kept(200, found[0]), *found[1], *self._call.begin()], data
        )
        return self.started

    def _kept(self, status: int, headers: Headers) -> Headers:
        """Of the engine's headers those that callers get."""
        kept = [header for header in headers if header[0] in _ANSWER_HEADERS]
        if self._stream and status == 200:
            kept += _STREAM_HEADERS
        return kept

    def tick(self, now: float, keep_alive: float) -> None:
        """A comment where nothing else is said for ``keep_alive`` seconds (0.0: never): no proxy on
        the way is to think it dead."""
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
        """The caller does not listen any more: of an answer that is out already, no loss."""
        if not self.ended:
            self.gone = True
            self._wake.set()

    async def start(self, status: int, headers: Headers, told: Headers) -> None:
        """The head: of the engine's headers those that callers get, and ``told``."""
        self.started = True
        found = [*self._kept(status, headers), *told]
        await self._call.send({"type": "http.response.start", "status": status, "headers": found})

    async def whole(self, status: int, headers: Headers, told: Headers, body: bytes) -> None:
        """An answer that is no stream; arguments as of ``start``."""
        writer = self._writer
        if writer is not None and not self._stream:
            found = [*self._kept(status, headers), *told, *self._call.begin()]
            if writer.whole(status, found, body):
                self.started = True
                return
        await self.start(status, headers, [*told, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def flush(self) -> None:
        """What waits; returns once a caller who reads slowly has read enough, or hung up."""
        data, self._backlog = bytes(self._backlog), bytearray()
        self._quiet_for = 0
        self._flushing = True
        try:
            await self._call.send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._flushing = False

    def close(self) -> None:
        """Nothing more is written. See ``Exchange.close``."""
        del self._source

    async def end(self, body: bytes = b"") -> None:
        """Whatever is not out yet of an answer's end."""
        if self.ended:
            return
        self.ended = True
        await self._call.send({"type": "http.response.body", "body": body, "more_body": False})
