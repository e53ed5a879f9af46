"""Small requests to a server: polls, probes, and what a fleet's controller says."""

from __future__ import annotations

import asyncio
from typing import Final

from paceline.http.upstream import ConnectError, Connection, Headers, Pool

__all__ = ["fetch"]

_MAX_ANSWER_BYTES: Final = 8 << 20


class _Collector:
    """Sink that collects a small answer in full."""

    def __init__(self, connection: Connection) -> None:
        # done when the answer is complete
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > _MAX_ANSWER_BYTES and not self.ready.done():
            self.ready.set_exception(ConnectError("the answer is too long"))

    def on_end(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def on_lost(self, why: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectError(why))


async def fetch(
    pool: Pool,
    method: str,
    path: str,
    headers: Headers,
    timeout: float,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Return status and body of an answer; ``body``: JSON to send. Raises ConnectError."""
    if body is not None:
        headers = [*headers, (b"content-type", b"application/json")]
    head = pool.origin.head(method, path, headers, None if body is None else len(body))
    found = await pool.ask(head + (body or b""), _Collector, timeout)
    return found.status, bytes(found.body)
