"""Open-loop load: requests that arrive whatever the servers do, and the latencies they see."""

from __future__ import annotations

import asyncio
import csv
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.client import Timing, complete
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.statistics import percentile

__all__ = [
    "FIRST_ID",
    "TRACE",
    "Load",
    "arrivals",
    "describe",
    "name_lengths",
    "read_lengths",
    "replay",
]

# trace of request lengths; ``read_lengths`` works without it too
TRACE = REPOSITORY.parent / "shared" / "traces" / "azure2023_conv_20min.csv"
SCALE = 0.25
TTFT_SECONDS = 1.0
TPOT_SECONDS = 0.1
# lengths without a trace: lognormal with the trace's means, scaled, and its ratios of mean to
# median (1252 / 1020 and 240 / 129)
MEANS = (313.0, 60.0)
SIGMAS = (0.64, 1.11)
MAX_PROMPT = 1500
MAX_OUTPUT = 500
# seconds after the last arrival at which unfinished requests are given up and count as missed
DRAIN_SECONDS = 30.0
# token ids below this may be special
FIRST_ID = 100
# seconds for a server to notice that callers have hung up
_SETTLE = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """A request of a plan."""

    # seconds after the start
    at: float
    prompt: list[int]
    output: int
    # the latency class that it names; "": none
    slo_class: str = ""
    tenant: str = ""
    # whether its answer counts; other requests are only load for those that do
    judged: bool = True


def read_lengths(trace: Path | None, count: int, seed: int) -> list[tuple[int, int]]:
    """Return prompt and output lengths: the trace's (columns ``prompt_tokens`` and
    ``output_tokens``), times SCALE; without a trace lognormal ones with its means.

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
        with trace.open(encoding="utf-8-sig", newline="") as file:
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
    """Name the source of the lengths, for the report: other sources' figures do not compare."""
    if trace is None or not trace.is_file():
        return f"lognormal, means {MEANS[0]:g} and {MEANS[1]:g}"
    return f"{trace.name} times {SCALE:g}"


def arrivals(
    rate: float, seconds: float, trace: Path | None, vocab_size: int, seed: int
) -> list[Load]:
    """Return a Poisson stream of ``rate`` requests/s with random prompts of realistic lengths."""
    rng = random.Random(seed)
    count = max(1, round(rate * seconds))
    at = 0.0
    result = []
    for prompt, output in read_lengths(trace, count, seed):
        at += rng.expovariate(rate)
        ids = [rng.randrange(FIRST_ID, vocab_size) for _ in range(prompt)]
        result.append(Load(at, ids, output))
    return result


async def replay(
    port: int,
    model: str,
    loads: Sequence[Load],
    *,
    timeout: float | None = None,
    ends: float = math.inf,
) -> list[Timing]:
    """Send every request at its time, whether earlier ones are done or not. Returns the answers to
    the judged ones, in their order; once all of these are there, or after ``ends`` seconds, the
    others hang up.

    Args:
        timeout: seconds for each answer; None: until DRAIN_SECONDS after the last arrival.
    """
    began = time.monotonic()
    last = max(load.at for load in loads)

    async def one(load: Load) -> Timing:
        await asyncio.sleep(max(0.0, began + load.at - time.monotonic()))
        return await complete(
            port,
            model,
            load.prompt,
            load.output,
            timeout=last + DRAIN_SECONDS - load.at if timeout is None else timeout,
            fields={"slo": load.slo_class} if load.slo_class else {},
            headers={"x-llm-d-inference-fairness-id": load.tenant} if load.tenant else {},
        )

    tasks = [asyncio.create_task(one(load)) for load in loads]
    awaited = [task for task, load in zip(tasks, loads, strict=True) if load.judged]
    if awaited:
        await asyncio.wait(awaited, timeout=None if ends == math.inf else ends)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if any(task.cancelled() for task in tasks):
        await asyncio.sleep(_SETTLE)
    return [
        Timing(began, (), 0, "cut off") if task.cancelled() else task.result() for task in awaited
    ]


def describe(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the figures of one run: percentiles in ms over finished requests, and the share of all
    requests that finished with TTFT and TPOT within the targets. A single token has no TPOT."""
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
