"""Cost of any relay in Python on this machine: it copies bytes between two connections, unparsed.

python -m benchmarks.gateway.bare PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop


class _Back(asyncio.Protocol):
    def __init__(self, front: _Front) -> None:
        self._front = front

    def data_received(self, data: bytes) -> None:
        self._front.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.transport.close()


class _Front(asyncio.Protocol):
    port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._back: Any = None
        self._early: list[bytes] = []
        self._task = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        back, _ = await loop.create_connection(lambda: _Back(self), "127.0.0.1", self.port)
        self._back = back
        for data in self._early:
            back.write(data)

    def data_received(self, data: bytes) -> None:
        if self._back is None:
            self._early.append(data)
        else:
            self._back.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._back is not None:
            self._back.close()


async def _serve(port: int) -> None:
    _Front.port = port
    server = await asyncio.get_running_loop().create_server(_Front, "127.0.0.1", 0, backlog=2048)
    print(f"bare ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1 ", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
