"""Streams of requests, sent at their times to a live server, and whether each was in time."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from benchmarks.common.client import Timing
from benchmarks.common.load import FIRST_ID, TRACE, Load, read_lengths, replay
from benchmarks.common.server import Server
from benchmarks.common.statistics import percentile

__all__ = [
    "PATIENCE",
    "TARGETS",
    "Load",
    "Pair",
    "Span",
    "beside",
    "burst",
    "figures",
    "flood",
    "loop_ms",
    "missed",
    "play",
    "reworded",
    "steady",
    "stream",
    "tenants",
    "ttft",
]

# seconds that a caller waits for the whole answer
PATIENCE = 40.0
# seconds: to the first token, for each token after it, for the whole answer
TARGETS: dict[str, tuple[float | None, float | None, float | None]] = {
    "interactive": (1.0, 0.1, None),
    "standard": (3.0, 0.15, None),
    "batch": (None, None, 30.0),
}
_AT = attrgetter("at")


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of a run: before the judged requests arrive, while they arrive, and the longest time
    for which others arrive until the judged ones have ended."""

    before: float
    judged: float
    after: float


def stream(
    rate: float,
    cv: float,
    seconds: float,
    vocab_size: int,
    seed: int,
    names: Sequence[str] = tuple(TARGETS),
    tenant: str = "",
) -> list[Load]:
    """Return a stream with gamma gaps, stretched so that exactly ``rate * seconds`` requests
    arrive; lengths from the trace; classes drawn evenly."""
    rng = random.Random(seed)
    shape = 1.0 / cv**2
    count = max(1, round(rate * seconds))
    gaps = [rng.gammavariate(shape, 1.0) for _ in range(count + 1)]
    stretch = seconds / sum(gaps)
    times = [stretch * at for at in accumulate(gaps[:-1])]
    lengths = read_lengths(TRACE, count, seed)
    return [
        Load(
            when,
            [rng.randrange(FIRST_ID, vocab_size) for _ in range(prompt)],
            output,
            rng.choice(names),
            tenant,
        )
        for when, (prompt, output) in zip(times, lengths, strict=True)
    ]


def steady(rate: float, cv: float, span: Span, vocab_size: int, seed: int) -> list[Load]:
    """Return three streams of one rate in a row, of which the middle one is judged: it meets the
    backlog of the first, and the last one goes on while it is being served."""
    loads: list[Load] = []
    begin = 0.0
    for part, seconds in enumerate((span.before, span.judged, span.after)):
        if seconds > 0.0:
            loads += [
                replace(load, at=begin + load.at, judged=part == 1)
                for load in stream(rate, cv, seconds, vocab_size, seed=3 * seed + part)
            ]
        begin += seconds
    return loads


def burst(count: int, vocab_size: int) -> list[Load]:
    """Return requests that arrive all at once."""
    rng = random.Random(0)
    return [
        Load(0.0, [rng.randrange(FIRST_ID, vocab_size) for _ in range(prompt)], output, "batch")
        for prompt, output in read_lengths(TRACE, count, 0)
    ]


def loop_ms() -> float:
    """Return milliseconds of a loop of fixed work: the present speed of one thread."""
    spent = []
    for _ in range(9):
        began = time.perf_counter()
        sum(number * number for number in range(40_000))
        spent.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(spent), 2)


class Pair(NamedTuple):
    """A stream whose requests count, and one that competes with it."""

    light: list[Load]
    heavy: list[Load]


def flood(unit: float, seconds: float, vocab_size: int, seed: int) -> Pair:
    """Return an interactive stream, and one of batch work beyond the capacity of a server that
    works a burst off at the rate ``unit``."""
    return Pair(
        stream(0.25 * unit, 1.0, seconds, vocab_size, 2 * seed, names=("interactive",)),
        stream(2.0 * unit, 1.0, seconds, vocab_size, 2 * seed + 1, names=("batch",)),
    )


def tenants(unit: float, seconds: float, vocab_size: int, seed: int) -> Pair:
    """Return the same for two tenants that both are interactive."""
    names = ("interactive",)
    return Pair(
        stream(0.2 * unit, 1.0, seconds, vocab_size, 2 * seed, names=names, tenant="light"),
        stream(2.0 * unit, 1.0, seconds, vocab_size, 2 * seed + 1, names=names, tenant="heavy"),
    )


def reworded(loads: Sequence[Load], seed: str) -> list[Load]:
    """Return the same requests with other prompts of equal length, different for each seed."""
    rng = random.Random(f"reworded {seed}")
    # token ids up to this are assumed to be in the vocabulary, as they were in the prompts
    most = max((max(load.prompt) for load in loads), default=FIRST_ID)
    return [
        replace(load, prompt=[rng.randint(FIRST_ID, most) for _ in load.prompt]) for load in loads
    ]


def play(
    server: Server, loads: Sequence[Load], *, classes: bool, ends: float = math.inf
) -> list[Timing]:
    """Send every request at its time, see ``replay``; with ``classes`` it names its class."""
    if not classes:
        loads = [replace(load, slo_class="") for load in loads]
    server.thaw()
    try:
        limit = min(ends, max(load.at for load in loads) + 2 * PATIENCE)
        sent = replay(server.port, server.model, loads, timeout=PATIENCE, ends=limit)
        return asyncio.run(sent)
    finally:
        server.freeze()


def missed(load: Load, timing: Timing) -> str:
    """Return the first target that was missed; "" if all were met."""
    if timing.error:
        return "answer"
    first, tpot, deadline = TARGETS[load.slo_class]
    if first is not None and timing.ttft > first:
        return "ttft"
    if tpot is not None and timing.tpot is not None and timing.tpot > tpot:
        return "tpot"
    if deadline is not None and timing.events[-1] - timing.sent > deadline:
        return "deadline"
    return ""


def figures(loads: Sequence[Load], timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
    """Return figures of the judged requests, which arrived within ``seconds``."""
    judged = [load for load in loads if load.judged]
    misses = [missed(load, timing) for load, timing in zip(judged, timings, strict=True)]
    kept = [not miss for miss in misses]
    by_class = {
        name: [k for k, load in zip(kept, judged, strict=True) if load.slo_class == name]
        for name in TARGETS
    }
    return {
        "requests": len(judged),
        "attainment": round(sum(kept) / len(kept), 4),
        "goodput_rps": round(sum(kept) / seconds, 3),
        "by_class": {n: round(sum(k) / len(k), 3) for n, k in by_class.items() if k},
        "missed": dict(Counter(filter(None, misses))),
        "refused": sum("429" in timing.error for timing in timings),
        "failed": sum(bool(timing.error) for timing in timings),
    }


def ttft(timings: Sequence[Timing], share: float) -> float:
    """Return a percentile in seconds; a failed request counts as PATIENCE seconds."""
    return percentile([PATIENCE if t.error else t.ttft for t in timings], share)


def beside(server: Server, pair: Pair, salt: str) -> tuple[list[Timing], list[Timing]]:
    """Return the answers to the light stream alone, and next to the heavy one. No prompt is in the
    prefix cache, unless this ``salt`` was used on the server before."""
    alone = play(server, reworded(pair.light, f"light alone {salt}"), classes=True)
    both = reworded(pair.light, f"light beside {salt}")
    both += [replace(load, judged=False) for load in reworded(pair.heavy, f"heavy {salt}")]
    both.sort(key=_AT)
    return alone, play(server, both, classes=True)
