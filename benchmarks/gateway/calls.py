"""Function calls per relayed chunk, which are the same on a busy machine as on a quiet one.

Streams go one after the other through a gateway in this process, chunk by chunk, from the engine
that computes nothing. Every call counts, of Python's functions and of built-in ones, from the time
an engine's bytes have been read until they are written to the caller's connection. Two figures: a
chunk in the middle of a stream (the median), and a chunk on average, which includes the additional
cost of the first and the last ones of a stream of ``TOKENS``.

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

from benchmarks.common.client import exchange
from benchmarks.gateway.mock import serve_mock
from paceline.gateway import EngineConfig, Gateway, GatewayConfig
from paceline.gateway.lifecycle import make_server
from paceline.http.keys import KeyRing
from paceline.http.listening import bind
from paceline.http.upstream import Connection

__all__ = ["calls_per_chunk"]

STREAMS = 8
TOKENS = 60
# seconds between two chunks, so that the one before has been relayed
_GAP = 0.002


def calls_per_chunk() -> dict[str, float]:
    """Return ``middle`` and ``mean``; see the module's docstring."""
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
    """Relay streams, fill ``counts``, and return the number of chunks."""
    server = make_server(gateway)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    await gateway.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        await _stream(port)
        # calls of the first request alone do not count
        counts.clear()
        return sum([await _stream(port) for _ in range(STREAMS)])
    finally:
        server.stop()
        await serving
        await gateway.close()


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the calls of each read with an engine's events; polls are left out. It works only for
    connections made from here on, as an event loop asks a protocol for its method once."""
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
        # the call that ended the count is left out
        counts.append(calls - 1)

    Connection.data_received = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Connection.data_received = really  # type: ignore[method-assign]


async def _stream(port: int) -> int:
    """Send one streamed request, and return the number of chunks."""
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    async with exchange(port, "/v1/chat/completions", body) as answer:
        lines: list[Any] = [line async for line in answer.lines()]
    if answer.status != 200 or lines[-2:].count(b"data: [DONE]") != 1:
        raise RuntimeError(f"status {answer.status}: {lines[-2:]}")
    return sum(line.startswith(b"data: {") for line in lines)


if __name__ == "__main__":
    print(json.dumps(calls_per_chunk()))
