"""The callers: requests in an open loop, timed, over connections that are kept.

    python -m benchmarks.gateway.load PORT MODEL RATE SECONDS TOKENS STREAM

prints one JSON line. It is a separate process, so that it can have a core of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop

from benchmarks.common.statistics import percentile
from paceline.http.upstream import Headers, Origin, Pool

_KEY = (b"authorization", b"Bearer sk-benchmark")


class _Timed:
    """A sink that records the times of the first content and of the end."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.first = 0.0
        self.chunks = 0
        self._seen = b""

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        if not self.first and b"word" in data:
            self.first = time.perf_counter()

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(self.status == 200 and self.first > 0.0)

    def on_lost(self, why: str) -> None:
        if not self.done.done():
            self.done.set_result(False)


async def _run(
    port: int, model: str, rate: float, seconds: float, tokens: int, stream: bool
) -> dict[str, Any]:
    pool = Pool(Origin.of(f"http://127.0.0.1:{port}"), connect_timeout=10.0, idle=30.0)
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Why is the sky blue? " * 8}],
            "max_tokens": tokens,
            "stream": stream,
        }
    ).encode()
    head = pool.origin.head(
        "POST",
        "/v1/chat/completions",
        [(b"content-type", b"application/json"), _KEY],
        len(body),
    )
    firsts: list[float] = []
    ends: list[float] = []
    failed = 0
    chunks = 0

    async def one(due: float) -> None:
        nonlocal failed, chunks
        connection = pool.free() or await pool.connect()
        sink = _Timed()
        connection.send(head + body, sink)
        try:
            async with asyncio.timeout(60):
                good = await sink.done
        except TimeoutError:
            good = False
        if good:
            # from the time it was due: a request that a busy sender sends late has waited too
            firsts.append(sink.first - due)
            ends.append(time.perf_counter() - due)
            chunks += sink.chunks
        else:
            failed += 1

    rng = random.Random(7)
    tasks = []
    began = time.perf_counter()
    due = began
    while due < began + seconds:
        due += rng.expovariate(rate)
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(due)))
    await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    pool.close()
    if not firsts:
        return {"requests": 0, "failed": failed}
    return {
        "requests": len(firsts),
        "failed": failed,
        "chunks": chunks,
        "seconds": took,
        "first_p50": percentile(firsts, 0.5),
        "first_p99": percentile(firsts, 0.99),
        "end_p50": percentile(ends, 0.5),
    }


def main() -> None:
    port, model, rate, seconds, tokens, stream = sys.argv[1:]
    result = uvloop.run(
        _run(int(port), model, float(rate), float(seconds), int(tokens), stream == "stream")
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
