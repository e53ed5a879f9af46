"""Function calls that a relayed chunk costs: the same on a busy machine as on a quiet one.

Streams go one after the other through a gateway in this process, chunk by chunk, from the engine
that computes nothing. Counted is every call, of Python's functions and of built-in ones, from an
engine's bytes having been read until they are written to the caller's connection. Two figures: a
chunk like the one before it, in the middle (the median), and a chunk on average, with what the
first and the last ones of a stream of ``TOKENS`` cost beside them.

    python -m benchmarks.gateway.calls
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from benchmarks.common.client import body_lines, read_head
from benchmarks.gateway.mock import serve_mock
from paceline.gateway import EngineConfig, Gateway, GatewayConfig
from paceline.gateway.lifecycle import make_server
from paceline.http.keys import KeyRing
from paceline.http.listening import bind
from paceline.http.upstream import Connection

__all__ = ["calls_per_chunk"]

STREAMS = 8
TOKENS = 60
# seconds between two chunks: enough for the one before to be through
_GAP = 0.002


def calls_per_chunk() -> dict[str, float]:
    """``middle`` and ``mean``; see above."""
    return uvloop.run(_measure())


async def _measure() -> dict[str, float]:
    engine, port = await serve_mock(_GAP)
    config = GatewayConfig(engines=(EngineConfig(name="mock", url=f"http://127.0.0.1:{port}"),))
    with _counted() as counts:
        chunks = await _relayed(Gateway(config, KeyRing(())), counts)
    engine.close()
    await engine.wait_closed()
    return {"middle": statistics.median(counts), "mean": round(sum(counts) / chunks, 1)}


async def _relayed(gateway: Gateway, counts: list[int]) -> int:
    """How many chunks came, and ``counts`` of those."""
    server = make_server(gateway)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    await gateway.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        await _stream(port)
        # less what only the first request costs
        counts.clear()
        return sum([await _stream(port) for _ in range(STREAMS)])
    finally:
        server.stop()
        await serving
        await gateway.close()


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Calls of each read in which an engine's events came; polls are left out. Of connections that
    are made from here on: an event loop asks a protocol for its method once."""
    counts: list[int] = []
    really = Connection.data_received

    def counted(self: Connection, data: bytes) -> None:
        if b"data: " not in data:
            really(self, data)
            return
        calls = 0

        def note(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            really(self, data)
        finally:
            sys.setprofile(None)
        # less the one that ended it
        counts.append(calls - 1)

    Connection.data_received = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Connection.data_received = really  # type: ignore[method-assign]


async def _stream(port: int) -> int:
    """How many chunks came."""
    body = json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": TOKENS,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        status, headers = await read_head(reader)
        chunked = headers.get(b"transfer-encoding") == b"chunked"
        lines: list[Any] = [line async for line in body_lines(reader, chunked)]
        if status != 200 or lines[-2:].count(b"data: [DONE]") != 1:
            raise RuntimeError(f"status {status}: {lines[-2:]}")
        return sum(line.startswith(b"data: {") for line in lines)
    finally:
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    print(json.dumps(calls_per_chunk()))
