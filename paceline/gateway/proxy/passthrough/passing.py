"""Pass-through of a request to one engine, and of its answer back: no retry, no stream relay, and
no effect on the engine's breaker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Final, Self

from starlette.types import Send

from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.errors import HttpError
from paceline.http.fields import is_plain
from paceline.http.upstream import ConnectError, Connection, Headers
from paceline.statuses import meaning_of

__all__ = ["Passed", "pass_on"]

# bytes that may wait for a caller before the engine is paused
_MOST_WAITING: Final = 256 * 1024
# size of an answer that is collected in full
_MOST_WHOLE: Final = 64 << 20
# engines' headers that are passed on to callers
_ANSWER_HEADERS: Final = frozenset(
    {
        b"content-type", b"content-disposition", b"retry-after", b"x-should-retry",
        b"x-content-type-options", b"x-paceline-ignored-fields", b"x-paceline-rewritten-messages",
    }
)  # fmt: skip


class Passed:
    """Answer of one engine as it arrives. A context manager, which ends it."""

    def __init__(self, upstream: Upstream, connection: Connection) -> None:
        self.upstream, self.connection = upstream, connection
        self.status = 0
        self.headers: Headers = []
        # done when the head came
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # the head was sent to the caller
        self.is_told = False
        self._parts: deque[bytes] = deque()
        self._waiting = 0
        self._wake = asyncio.Event()
        self._ended = False
        # why the connection was lost; None: it was not
        self._why: str | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        """Take the head of the answer."""
        self.status, self.headers = status, headers
        if not self.ready.done():
            self.ready.set_result(None)

    def on_data(self, data: bytes) -> None:
        """Take a part of the body; pause the engine if too much waits."""
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting > _MOST_WAITING:
            self.connection.pause()
        self._wake.set()

    def on_end(self) -> None:
        """Note that the answer is complete."""
        self._ended = True
        self._wake.set()

    def on_lost(self, why: str) -> None:
        """Note that the connection ended before the answer did."""
        self._why = why
        if not self.ready.done():
            self.ready.set_exception(ConnectError(why))
        self._wake.set()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body. Raises ConnectError if the engine breaks off."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._waiting -= len(part)
                yield part
            if self._ended:
                return
            if self._why is not None:
                raise ConnectError(self._why)
            self.connection.resume()
            await self._wake.wait()
            self._wake.clear()

    async def whole(self) -> bytes:
        """Collect a small answer in full. Raises ConnectError."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > _MOST_WHOLE:
                raise ConnectError(f"an answer of more than {_MOST_WHOLE} bytes")
        return bytes(body)

    async def tell(self, send: Send) -> None:
        """Send the answer to the caller: its status, a few headers, and its body as it arrives."""
        if meaning_of(self.status) == "account":
            # the engine refused the gateway's key, not the caller's
            raise HttpError(502, f"engine {self.upstream.name} refused the gateway's credentials")
        found = dict(self.headers)
        if not is_plain(found.get(b"content-encoding", b"").decode("latin-1")):
            raise HttpError(502, f"the answer of engine {self.upstream.name} is compressed")
        headers = [header for header in self.headers if header[0] in _ANSWER_HEADERS]
        headers.append((b"x-paceline-engine", self.upstream.name.encode()))
        if self.status >= 400:
            body = await self.whole()
            if self.upstream.key:
                body = body.replace(self.upstream.key.encode(), b"***")
            headers.append((b"content-length", b"%d" % len(body)))
            self.is_told = True
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        headers += [header for header in self.headers if header[0] == b"content-length"]
        self.is_told = True
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async for part in self.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._ended:
            self.connection.drop()


async def pass_on(
    upstream: Upstream,
    method: str,
    target: str,
    headers: Headers,
    body: bytes | None,
    timeout: float,
) -> Passed:
    """Ask ``upstream``, and wait for the head of its answer.

    Args:
        headers: in addition to those of every request to the engine.
        body: None: no body.
        timeout: of the head, s.

    Raises ConnectError.
    """
    length = None if body is None else len(body)
    said = {name for name, _ in headers}
    common = [h for h in upstream.headers() if h[0] not in said] + headers
    request = upstream.pool.origin.head(method, target, common, length) + (body or b"")
    return await upstream.pool.ask(request, partial(Passed, upstream), timeout)
