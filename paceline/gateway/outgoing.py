"""The caller's side of one request: its connection, and what waits to be written there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import Scope, Send

from paceline.http.shortcut import BODY_WRITER, BodyWriter
from paceline.http.sse import KEEP_ALIVE
from paceline.http.upstream import Headers

__all__ = ["Outgoing"]

# waiting for the caller to read before the engine is read no further
_MAX_BACKLOG: Final = 64 * 1024
# of engines that callers get
_ANSWER_HEADERS: Final = frozenset(
    {
        b"content-type",
        b"retry-after",
        b"x-should-retry",
        b"x-paceline-ignored-fields",
        b"x-llm-d-request-dropped-reason",
    }
)


class Outgoing:
    """What is written goes out in the call that wrote it, where the connection takes it; else it
    waits for the request's task to flush it.

    Args:
        stream: the caller asked for events.
        wake: set when there is something to flush, or the caller is gone.
        hold_back: called when more waits than may.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        *,
        stream: bool,
        wake: asyncio.Event,
        hold_back: Callable[[], None],
        now: float,
    ) -> None:
        self._writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
        self._send, self._stream, self._wake, self._hold_back = send, stream, wake, hold_back
        self._backlog = bytearray()
        # the status is told
        self.started = False
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
        if self.started and not self._backlog and writer is not None and writer.is_ready:
            writer.write(data)
            self._quiet_for = 0
            return
        self._backlog += data
        if len(self._backlog) > _MAX_BACKLOG:
            self._hold_back()
        self._wake.set()

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
        self.gone = True
        self._wake.set()

    async def start(self, status: int, headers: Headers, told: Headers) -> None:
        """The head: of the engine's headers those that callers get, and ``told``."""
        self.started = True
        kept = [header for header in headers if header[0] in _ANSWER_HEADERS]
        if self._stream and status == 200:
            kept += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        kept += told
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def flush(self) -> None:
        """What waits; returns once a caller who reads slowly has read enough, or hung up."""
        data, self._backlog = bytes(self._backlog), bytearray()
        self._quiet_for = 0
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
