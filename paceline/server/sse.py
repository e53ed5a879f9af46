"""Server-sent events, and noticing that a caller hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.errors import ClientDisconnectedError

__all__ = ["DONE", "EventStream", "event", "unless_disconnected"]

_T = TypeVar("_T")

DONE: Final = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event; ``payload`` is JSON and so has no line breaks."""
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Streams events as they come, and closes ``events`` when the caller hangs up.

    Args:
        first: what to send with the headers; the source has already shown that it works.
        events: the rest, ready to send. Ends with ``DONE``.
        describe: makes the body of the error event when ``events`` raises. Such a stream still
            ends with ``DONE``, as vLLM's do.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        describe: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # Response counted its empty body
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._describe = describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(send))
        except ClientDisconnectedError:
            return
        finally:
            await self._events.aclose()

    async def _stream(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            failure = event(self._describe(error)) + DONE
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do ``work``, or cancel it as soon as the caller hangs up.

    The request's body must have been read: what arrives on ``receive`` is thrown away.

    Raises:
        ClientDisconnectedError: the caller hung up first; ``work`` has been cancelled and is over.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
