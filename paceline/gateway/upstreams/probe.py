"""Small requests to an engine in addition to those that it serves: polls and probes."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from paceline.http.upstream import ConnectError, Headers, Pool

__all__ = ["fetch_small"]

_MAX_ANSWER_BYTES: Final = 8 << 20


class _Upstream(Protocol):
    """The part of ``Upstream`` that ``fetch_small`` needs."""

    pool: Pool

    def headers(self) -> Headers: ...


class _Collector:
    """Sink that collects a small answer in full."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _MAX_ANSWER_BYTES and not self.done.done():
            self.done.set_exception(ConnectError("the answer is too long"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))

    def on_lost(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectError(why))


async def fetch_small(
    upstream: _Upstream, path: str, timeout: float, body: bytes | None = None
) -> tuple[int, bytes]:
    """Return status and body of a GET, or of a POST of ``body`` (JSON). Raises ConnectError."""
    connection = sink = None
    headers = upstream.headers()
    if body is not None:
        headers.append((b"content-type", b"application/json"))
    length = None if body is None else len(body)
    head = upstream.pool.origin.head("GET" if body is None else "POST", path, headers, length)
    try:
        async with asyncio.timeout(timeout):
            for _ in range(2):
                reused = upstream.pool.free()
                connection = reused or await upstream.pool.connect()
                sink = _Collector()
                connection.send(head + (body or b""), sink)
                try:
                    answer = await sink.done
                except ConnectError:
                    # the engine closed the idle connection just as it was reused
                    if reused is None or connection.begun:
                        raise
                    continue
                connection = None
                return answer
            raise ConnectError("two connections were closed")
    except TimeoutError:
        # after a held-up event loop, answer and timeout arrive together: the answer counts
        if sink is None or not sink.done.done() or sink.done.cancelled():
            raise ConnectError(f"no answer within {timeout:g} s") from None
        answer = sink.done.result()
        connection = None
        return answer
    finally:
        if connection is not None:
            connection.drop()
