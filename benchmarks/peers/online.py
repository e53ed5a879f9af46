"""Requests that arrive whatever the servers do, and how long their callers wait."""

from __future__ import annotations

import asyncio
import csv
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.base import REPOSITORY, Peer, Unavailable
from benchmarks.peers.http_client import Timing, complete
from benchmarks.peers.process import Process

__all__ = [
    "TRACE",
    "Arrival",
    "Server",
    "arrivals",
    "describe",
    "name_lengths",
    "percentile",
    "read_lengths",
    "replay",
]

# of the lengths of requests; read_lengths says what comes in its place
TRACE = REPOSITORY.parent / "shared" / "traces" / "azure2023_conv_20min.csv"
SCALE = 0.25
TTFT_SECONDS = 1.0
TPOT_SECONDS = 0.1
# lengths where no trace is at hand: lognormal with the trace's means, scaled, and its ratios of
# mean to median (1252 / 1020 and 240 / 129)
MEANS = (313.0, 60.0)
SIGMAS = (0.64, 1.11)
MAX_PROMPT = 1500
MAX_OUTPUT = 500
# after the last arrival; what is unfinished then is given up and counts as missed
DRAIN_SECONDS = 30.0
# servers are asked this often whether they answer yet
_POLL_SECONDS = 0.05
_FIRST_ID = 100


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come."""

    # seconds after the start
    at: float
    prompt: list[int]
    output: int


def read_lengths(trace: Path | None, count: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output lengths: the trace's (columns ``prompt_tokens`` and ``output_tokens``),
    times SCALE; without a trace lognormal ones of its means.

    Of a trace, one request is drawn from each of ``count`` equal parts by length of prompt, so that
    short runs at different rates have the same mix; their order is random too.
    """
    rng = random.Random(seed)
    if trace is None or not trace.is_file():
        pairs = [
            tuple(
                rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
                for mean, sigma in zip(MEANS, SIGMAS, strict=True)
            )
            for _ in range(count)
        ]
    else:
        with trace.open(newline="") as file:
            rows = sorted(
                (int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in csv.DictReader(file)
            )
        part = len(rows) / count
        chosen = [rows[int((i + rng.random()) * part)] for i in range(count)]
        rng.shuffle(chosen)
        pairs = [(prompt * SCALE, output * SCALE) for prompt, output in chosen]
    return [
        (min(MAX_PROMPT, max(1, round(prompt))), min(MAX_OUTPUT, max(1, round(output))))
        for prompt, output in pairs
    ]


def name_lengths(trace: Path | None) -> str:
    """Where ``read_lengths`` has them from, for the report: figures of the two do not compare."""
    if trace is None or not trace.is_file():
        return f"lognormal, means {MEANS[0]:g} and {MEANS[1]:g}"
    return f"{trace.name} times {SCALE:g}"


def arrivals(
    rate: float, seconds: float, trace: Path | None, vocab_size: int, seed: int
) -> list[Arrival]:
    """A Poisson stream of ``rate`` requests a second, random prompts of realistic lengths."""
    rng = random.Random(seed)
    count = max(1, round(rate * seconds))
    at = 0.0
    result = []
    for prompt, output in read_lengths(trace, count, seed):
        at += rng.expovariate(rate)
        ids = [rng.randrange(_FIRST_ID, vocab_size) for _ in range(prompt)]
        result.append(Arrival(at, ids, output))
    return result


async def replay(port: int, model: str, plan: Sequence[Arrival]) -> list[Timing]:
    """Send every request at its time, done or not what came before; in the order of ``plan``."""
    began = time.monotonic()
    last = plan[-1].at

    async def one(arrival: Arrival) -> Timing:
        await asyncio.sleep(max(0.0, began + arrival.at - time.monotonic()))
        left = last + DRAIN_SECONDS - arrival.at
        return await complete(port, model, arrival.prompt, arrival.output, timeout=left)

    return list(await asyncio.gather(*(one(arrival) for arrival in plan)))


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between ranks, as numpy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(timings: Sequence[Timing]) -> dict[str, Any]:
    """The figures of one run: percentiles in ms over what finished, and the share of all requests
    that finished with TTFT and TPOT within the targets. A single token has no TPOT to miss."""
    done = [timing for timing in timings if not timing.error]
    within = [
        timing
        for timing in done
        if timing.ttft <= TTFT_SECONDS and (timing.tpot is None or timing.tpot <= TPOT_SECONDS)
    ]
    figures: dict[str, Any] = {
        "requests": len(timings),
        "failed": len(timings) - len(done),
        "attainment": round(len(within) / len(timings), 4),
    }
    for name, values in (
        ("ttft_ms", [timing.ttft for timing in done]),
        ("tpot_ms", [timing.tpot for timing in done if timing.tpot is not None]),
        ("itl_ms", [gap for timing in done for gap in timing.gaps]),
    ):
        if values:
            figures[name] = {
                "p50": round(statistics.median(values) * 1e3, 1),
                "p99": round(percentile(values, 0.99) * 1e3, 1),
            }
    if len(done) < len(timings):
        figures["first_error"] = next(timing.error for timing in timings if timing.error)
    return figures


class Server(Process):
    """A server that answers. ``startup`` is the seconds from its start to its first token.

    Raises Unavailable when there is none or it does not answer.
    """

    def __init__(self, peer: Peer, port: int, log: Path, vocab_size: int) -> None:
        self.name = peer.name
        self.port = port
        command = peer.server(port)
        began = time.monotonic()
        super().__init__(command, log)
        try:
            self._wait(began + command.start_seconds)
            self.startup = time.monotonic() - began
            plan = arrivals(8.0, 1.0, None, vocab_size, seed=-1)
            asyncio.run(replay(port, self.model, plan))
        except BaseException:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        prompt = list(range(_FIRST_ID, _FIRST_ID + 128))
        error = "it did not listen"
        while time.monotonic() < deadline:
            if not self.alive:
                raise Unavailable(f"the server ended: {self.tail()}")
            models = asyncio.run(_models(self.port))
            if models:
                self.model = models[0]
                timing = asyncio.run(complete(self.port, self.model, prompt, 1, timeout=60))
                if not timing.error:
                    return
                error = timing.error
            time.sleep(_POLL_SECONDS)
        raise Unavailable(f"the server gave no token: {error}: {self.tail()}")

    def measure(self, plan: Sequence[Arrival]) -> dict[str, Any]:
        """Replay a plan; see ``describe``."""
        self.thaw()
        figures = describe(asyncio.run(replay(self.port, self.model, plan)))
        self.freeze()
        print(f"  {self.name:18} {figures}", file=sys.stderr)
        return figures


async def _models(port: int) -> list[str]:
    """Names the server has for its models; none while it does not answer."""
    import json

    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(
                    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
                )
                answer = await reader.read()
            finally:
                writer.close()
        body = answer[answer.index(b"{") : answer.rindex(b"}") + 1]
        return [entry["id"] for entry in json.loads(body)["data"]]
    except (OSError, ValueError, KeyError, TimeoutError):
        return []
