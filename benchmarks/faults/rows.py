"""The faults, one function each: break something, and report the effect on clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.client import get
from benchmarks.faults.callers import Seen, ask, counted, mismatches
from benchmarks.faults.malformed import malformed, send
from benchmarks.faults.server import FaultyServer, metric

__all__ = ["ROWS", "Load", "Row", "reference"]

Row = dict[str, Any]

STREAMS = 64
# number of engines that are killed, and of engines that are stopped
TIMES = int(os.environ.get("TIMES") or 1)
# requests in addition to the streams whose answers are not streamed
WHOLE = 16
TOKENS = 32
# settings that depend on earlier output: sampling, penalties, a grammar, several choices
KINDS: tuple[Row, ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 7, "ignore_eos": True},
    {
        "temperature": 0.8,
        "seed": 8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    },
    {
        "temperature": 0.8,
        "seed": 9,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "numbers",
                "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 20},
            },
        },
    },
    {"temperature": 0.8, "seed": 10, "n": 2, "ignore_eos": True},
)
IDLE, ACTIVE = 1000, 200
SLOW, SLOW_TOKENS = 100, 250
MALFORMED = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts with the answers of a server without faults."""

    prompts: list[str]
    answers: list[list[int]]

    def body(self, index: int, *, stream: bool, tokens: int = TOKENS, **more: Any) -> Row:
        index %= len(self.prompts)
        return {
            "prompt": self.prompts[index],
            "max_tokens": tokens,
            "stream": stream,
            **KINDS[index % len(KINDS)],
            **more,
        }

    def answer(self, index: int) -> list[int]:
        return self.answers[index % len(self.answers)]

    def wrong(self, seen: Sequence[Seen], first: int = 0) -> int:
        """Count ``mismatches``; ``seen[i]`` answers prompt ``first + i``."""
        return mismatches((each, self.answer(first + i)) for i, each in enumerate(seen))


async def reference(server: FaultyServer) -> Load:
    """Get answers of every kind. The prompts are sequences of numbers."""
    prompts = [
        ", ".join(str(number) for number in range(10 * first, 10 * first + 15)) + ","
        for first in range(1, STREAMS + WHOLE + 1)
    ]
    load = Load(prompts, [])
    bodies = [load.body(index, stream=False) for index in range(len(prompts))]
    seen = await asyncio.gather(*(ask(server.port, body) for body in bodies))
    if any(not each.finished for each in seen):
        raise RuntimeError(f"an unhurt server answered {counted(seen)}")
    return Load(prompts, [each.token_ids for each in seen])


async def engine_failed(server: FaultyServer, load: Load, number: signal.Signals) -> Row:
    """Send the engine a signal in the middle of its work."""
    before = server.rss_mb()
    streams = [
        asyncio.create_task(ask(server.port, load.body(i, stream=True))) for i in range(STREAMS)
    ]
    whole = [
        asyncio.create_task(ask(server.port, load.body(STREAMS + i, stream=False)))
        for i in range(WHOLE)
    ]
    made = metric(await server.scrape(), "vllm:generation_tokens_total")
    third = made + sum(map(len, load.answers)) / 3
    while metric(await server.scrape(), "vllm:generation_tokens_total") < third:
        await asyncio.sleep(0.02)
    server.hurt(number)
    hurt = time.monotonic()
    live: Counter[int] = Counter()

    async def watch_liveness() -> None:
        while True:
            live[(await get(server.port, "/health/live"))[0]] += 1
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch_liveness())
    red = await server.until("/health/ready", lambda status: status != 200, 30.0)
    green = await server.until("/health/ready", lambda status: status == 200, 60.0)
    fresh = await ask(server.port, load.body(0, stream=True))
    streamed, answered = await asyncio.gather(*streams), await asyncio.gather(*whole)
    # as client libraries do: retry all requests that did not finish
    again = [i for i, each in enumerate(streamed) if not each.finished]
    retried = await asyncio.gather(*(ask(server.port, load.body(i, stream=True)) for i in again))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    blocks = await server.at_rest()
    return {
        "streams": counted(streamed),
        "not_streamed": counted(answered),
        "streams_retried": counted(retried),
        "tokens_before_the_error": sum(len(streamed[i].token_ids) for i in again),
        "tokens_lost_or_doubled": load.wrong(streamed)
        + load.wrong(answered, STREAMS)
        + mismatches((seen, load.answer(i)) for i, seen in zip(again, retried, strict=True)),
        "seconds_to_red": round(red - hurt, 2),
        "recovery_seconds": round(green - hurt, 2),
        "longest_pause_of_a_stream_seconds": round(max(s.longest_gap() for s in streamed), 2),
        "first_token_of_a_new_request_seconds": round((fresh.times or [0.0])[0] - hurt, 2),
        "liveness": dict(live),
        "kv_blocks_left_taken": blocks,
        "memory_growth_mb": round(server.rss_mb() - before, 1),
    }


def together(runs: Sequence[Row]) -> Row:
    """Merge rows of the same fault: counts are added up, times become median and longest."""
    row: Row = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(value, dict):
            row[name] = dict(sum(map(Counter, values), Counter()))
        elif isinstance(value, float):
            row[name] = statistics.median(values)
            row[f"{name}_max"] = max(values)
        else:
            row[name] = sum(values)
    return row


async def killed(server: FaultyServer, load: Load) -> Row:
    return together([await engine_failed(server, load, signal.SIGKILL) for _ in range(TIMES)])


async def stopped(server: FaultyServer, load: Load) -> Row:
    return together([await engine_failed(server, load, signal.SIGSTOP) for _ in range(TIMES)])


async def scraped(server: FaultyServer, load: Load) -> Row:
    """Scrape like Prometheus, ten times a second, at full load."""
    before = server.rss_mb()
    seconds: list[float] = []
    statuses: Counter[int] = Counter()

    async def scrape() -> None:
        while True:
            began = time.monotonic()
            statuses[(await get(server.port, "/metrics"))[0]] += 1
            seconds.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, began + 0.1 - time.monotonic()))

    alone = time.monotonic()
    await asyncio.gather(*(ask(server.port, load.body(i, stream=True)) for i in range(STREAMS)))
    alone = time.monotonic() - alone
    scraping = asyncio.create_task(scrape())
    began = time.monotonic()
    seen = await asyncio.gather(
        *(ask(server.port, load.body(i, stream=True)) for i in range(STREAMS))
    )
    beside = time.monotonic() - began
    scraping.cancel()
    await asyncio.gather(scraping, return_exceptions=True)
    return {
        "streams": counted(seen),
        "tokens_lost_or_doubled": load.wrong(seen),
        "scrapes": {str(status): count for status, count in statuses.items()},
        "scrape_ms": {
            "p50": round(1e3 * statistics.median(seconds), 1),
            "max": round(1e3 * max(seconds), 1),
        },
        "seconds_without_and_with": [round(alone, 2), round(beside, 2)],
        "memory_growth_mb": round(server.rss_mb() - before, 1),
    }


async def crowded(server: FaultyServer, load: Load) -> Row:
    """Open many silent connections, next to some with requests."""
    before = server.rss_mb()
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(IDLE)]
    crowd = server.rss_mb()
    seen = await asyncio.gather(
        *(ask(server.port, load.body(i, stream=True), timeout=120.0) for i in range(ACTIVE))
    )
    busy = server.rss_mb()
    # a connection that was silent so far is answered all the same
    reader, writer = idle[-1]
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    late = await asyncio.wait_for(reader.readline(), 5.0)
    for _, each in idle:
        each.close()
    blocks = await server.at_rest()
    return {
        "active": counted(seen),
        "tokens_lost_or_doubled": load.wrong(seen),
        "an_idle_one_that_speaks": late.decode().strip(),
        "kb_an_idle_connection": round((crowd - before) * 1024 / IDLE, 1),
        "kv_blocks_left_taken": blocks,
        "memory_growth_mb": round(busy - before, 1),
        "memory_growth_after_mb": round(server.rss_mb() - before, 1),
    }


async def unread(server: FaultyServer, load: Load) -> Row:
    """Request long answers without reading them, next to callers who read."""
    cut = metric(await server.scrape(), "paceline:slow_readers_cut_total")
    before = server.rss_mb()
    # log-probabilities make events large, so that buffers fill up within seconds
    wanted = load.body(0, stream=True, tokens=SLOW_TOKENS, logprobs=True, top_logprobs=20)
    wanted["messages"] = [{"role": "user", "content": wanted.pop("prompt")}]
    body = json.dumps(wanted).encode()
    lazy = []
    for _ in range(SLOW):
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", server.port))
        caller.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        lazy.append(caller)
    peak = before
    reading = asyncio.gather(
        *(ask(server.port, load.body(i, stream=True), timeout=120.0) for i in range(WHOLE))
    )
    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(90.0):
            while metric(await server.scrape(), "paceline:slow_readers_cut_total") - cut < SLOW:
                peak = max(peak, server.rss_mb())
                await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    seen = await reading
    for caller in lazy:
        caller.close()
    blocks = await server.at_rest()
    return {
        "cut": round(metric(await server.scrape(), "paceline:slow_readers_cut_total") - cut),
        "of": SLOW,
        "seconds_to_all_cut": round(seconds, 1),
        "who_reads": counted(seen),
        "tokens_lost_or_doubled": load.wrong(seen),
        "kv_blocks_left_taken": blocks,
        "memory_growth_mb": round(peak - before, 1),
        "memory_growth_after_mb": round(server.rss_mb() - before, 1),
    }


async def nonsense(server: FaultyServer, load: Load) -> Row:
    """Send ten thousand malformed requests, next to a few good ones."""
    before = server.rss_mb()
    cases = malformed(MALFORMED, random.Random(0))
    answers: Counter[str] = Counter()
    queue = iter(cases)

    async def worker() -> None:
        for case in queue:
            answers[await send(server.port, case)] += 1

    began = time.monotonic()
    sensible = asyncio.gather(*(ask(server.port, load.body(i, stream=True)) for i in range(WHOLE)))
    await asyncio.gather(*(worker() for _ in range(32)))
    seen = await sensible
    seconds = time.monotonic() - began
    status, _ = await get(server.port, "/health")
    return {
        "answers": dict(sorted(answers.items())),
        "server_errors": sum(count for name, count in answers.items() if name.startswith("5")),
        "a_second": round(MALFORMED / seconds),
        "who_makes_sense": counted(seen),
        "tokens_lost_or_doubled": load.wrong(seen),
        "health_after": status,
        "memory_growth_mb": round(server.rss_mb() - before, 1),
    }


async def drained(server: FaultyServer, load: Load) -> Row:
    """Send SIGTERM under load; the last row, since the server ends with it."""
    running = [
        asyncio.create_task(ask(server.port, load.body(i, stream=i % 2 == 0)))
        for i in range(STREAMS)
    ]
    while metric(await server.scrape(), "vllm:num_requests_running") < STREAMS:
        await asyncio.sleep(0.01)
    server.send_signal(signal.SIGTERM)
    await server.until("/health/ready", lambda status: status != 200, 5.0)
    late = await asyncio.gather(*(ask(server.port, load.body(i, stream=True)) for i in range(8)))
    seen = await asyncio.gather(*running)
    began = time.monotonic()
    while server.alive and time.monotonic() - began < 20.0:
        await asyncio.sleep(0.02)
    return {
        "running": counted(seen),
        "late": counted(late),
        "late_have_retry_after": all(each.retry_after for each in late),
        "tokens_lost_or_doubled": load.wrong(seen),
        "exit_code": server.exit_code,
        "seconds_from_last_token_to_exit": round(time.monotonic() - began, 2),
    }


ROWS: dict[str, Callable[[FaultyServer, Load], Coroutine[Any, Any, Row]]] = {
    "engine killed -9": killed,
    "engine SIGSTOPped": stopped,
    "scraped at 10 Hz": scraped,
    "1,000 idle + 200 active": crowded,
    "100 slow readers": unread,
    "10,000 malformed requests": nonsense,
    "SIGTERM": drained,
}
