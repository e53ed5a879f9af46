"""Server-sent events, and detection of callers that hang up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.http.body_writer import BODY_WRITER, BodyWriter
from paceline.http.errors import ClientDisconnectedError
from paceline.http.shortcut import Shortcut

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "SSE",
    "STREAM_HEADERS",
    "EventStream",
    "TextEvents",
    "TokenEvents",
    "event",
    "first_event",
    "unless_disconnected",
]

_T = TypeVar("_T")

# the library's own method, as ``wire.encode`` would be one more call for every token
_encode: Final = msgspec.json.Encoder().encode

SSE: Final = "text/event-stream"
# headers of every stream, so that no proxy on the way buffers it; nginx reads the second
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE: Final = b"data: [DONE]\n\n"
# a comment, which readers skip
KEEP_ALIVE: Final = b": keep-alive\n\n"


def event(payload: bytes) -> bytes:
    """One event; ``payload`` is JSON and so has no line breaks."""
    return b"data: " + payload + b"\n\n"


class TextEvents:
    """Events that differ in one text; all else is encoded once.

    Args:
        example: such an event, with ``"NAME": ""`` in place of the text, for one NAME; no
            caller's input can look like it, as quotes inside of strings are escaped.
        name: NAME.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, example: bytes, name: str) -> None:
        key = f'"{name}":'.encode()
        before, found, self._after = example.partition(key + b'""')
        assert found, f"no empty {name!r} in {example!r}"
        self._before = before + key

    def event(self, text: str, token_ids: tuple[int, ...]) -> bytes:
        """Return the event with ``text``, byte for byte as if it were encoded completely; its token
        ids are left out."""
        return self._before + _encode(text) + self._after


class TokenEvents:
    """Events that differ in one text and in the ids of its tokens.

    Args:
        example: as for ``TextEvents``, with ``"token_ids": []`` after the text.
        name: of the text.
    """

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, example: bytes, name: str) -> None:
        key, ids = f'"{name}":'.encode(), b'"token_ids":'
        before, found, rest = example.partition(key + b'""')
        between, found_ids, self._after = rest.partition(ids + b"[]")
        assert found and found_ids, f"no empty {name!r} and token_ids in {example!r}"
        self._before, self._between = before + key, between + ids

    def event(self, text: str, token_ids: tuple[int, ...]) -> bytes:
        """Return the event with both, byte for byte as if it were encoded completely."""
        return self._before + _encode(text) + self._between + _encode(token_ids) + self._after


class EventStream(Response):
    """Streams events as they come, and closes ``events`` when the caller hangs up.

    Args:
        first: sent with the headers; the source has already shown that it works.
        events: the rest, ready to send, including the end of such a stream.
        failed: returns the last bytes of the stream when ``events`` raises.
        keep_alive: seconds without an event after which a comment is sent, so that no proxy on
            the way takes the connection for dead; 0 sends none.
        media_type: other than ``SSE`` if these are no server-sent events, and have no comments.
        shortcut: opened after ``first``, if the scope has a ``BodyWriter``, and closed again.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[Exception], bytes],
        keep_alive: float = 0.0,
        *,
        shortcut: Shortcut[Any],
        media_type: str = SSE,
    ) -> None:
        super().__init__(media_type=media_type, headers=STREAM_HEADERS)
        # Response has set the length of its empty body
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._failed = failed
        self._keep_alive = keep_alive
        self._shortcut = shortcut
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(scope, send))
        except ClientDisconnectedError:
            return
        finally:
            await self._events.aclose()

    async def _stream(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        beating = asyncio.ensure_future(self._beat(send)) if self._keep_alive > 0 else None
        try:
            await self._send(send, self._first)
            writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
            if writer is not None:
                self._shortcut.open(writer)
            async for chunk in self._events:
                await self._send(send, chunk)
        except Exception as error:
            await self._send(send, self._failed(error))
        finally:
            self._shortcut.close()
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _beat(self, send: Send) -> None:
        """Send comments between events. Messages are sent whole, so two tasks may send."""
        while True:
            sent_at = max(self._sent_at, self._shortcut.written_at)
            wait = sent_at + self._keep_alive - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self._send(send, KEEP_ALIVE)


async def first_event(
    source: AsyncGenerator[bytes, None], receive: Receive, patience: float
) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """Return the first event and the rest.

    After ``patience`` seconds (0: never) without one, the first is a comment: the request still
    waits, but its answer begins. An error before that is raised, so that a refusal is still a
    status code.

    Raises:
        ClientDisconnectedError: the caller hung up first; ``source`` is closed.
    """
    pending = asyncio.ensure_future(anext(source))

    async def wait() -> None:
        await asyncio.wait((pending,), timeout=patience or None)

    try:
        await unless_disconnected(receive, wait())
    except BaseException:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await source.aclose()
        raise
    if pending.done():
        return pending.result(), source

    async def rest() -> AsyncGenerator[bytes, None]:
        try:
            yield await pending
            async for data in source:
                yield data
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await source.aclose()

    return KEEP_ALIVE, rest()


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do ``work``, or cancel it as soon as the caller hangs up.

    The request's body must have been read: messages on ``receive`` are dropped.

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
