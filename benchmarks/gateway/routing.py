"""Policies to choose an engine, in the simulator: the gateway's against others, on same arrivals.

Engines differ: seconds per step and blocks of KV cache of each are in ``POOLS``. The load is a
share of their joint capacity: tokens a second of all slots, or as many as memory allows, whichever
is less. Two loads: mixed (every prompt its own) and shared (sixteen long prefixes, half the
requests of the four commonest). In addition random pools of two to six engines, set by
POOLS=N,SEED. Goodput is the share of requests that meet both their targets.

The state of engines that the gateway's policy sees is 0, 0.25 or 1 s old; other policies count
their own requests, whose state is never old.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.routing import LeastOutstanding, PredictedRouter, PrefixAffinity, RoundRobin, Router
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import ReplicaConfig
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes

__all__ = ["routing"]

BLOCK = 16
# time of a prompt token, as a share of the step's seconds
_PER_TOKEN = 0.002
_SEQUENCES = 64
_OUTPUT = 128
_PROMPT = 400
_PREFIX_BLOCK = 256
STALENESS = (0.0, 0.25, 1.0)
_POLICIES = (
    "round-robin", "least-outstanding", "prefix-affinity",
    *(f"predicted {seconds:g} s" for seconds in STALENESS),
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """Seconds per step and KV blocks of an engine."""

    step: float
    blocks: int

    @property
    def rate(self) -> float:
        """Approximate capacity in requests a second, by its memory, its slots and its steps."""
        held = (_PROMPT + _OUTPUT) / BLOCK
        running = min(_SEQUENCES, self.blocks / held)
        seconds = self.step * (1.0 + _PER_TOKEN * running) * _OUTPUT
        prompt = self.step * _PER_TOKEN * _PROMPT
        return running / (seconds + running * prompt)


POOLS = {
    "10-20-40-80": (Engine(0.01, 4000), Engine(0.02, 2000), Engine(0.04, 1000), Engine(0.08, 500)),
    "four alike": (Engine(0.02, 1500),) * 4,
    "one of eight is slow": (*(Engine(0.02, 1500),) * 7, Engine(0.1, 1500)),
    "two": (Engine(0.015, 800), Engine(0.03, 3000)),
}


def random_pools(count: int, seed: int) -> list[tuple[str, tuple[Engine, ...], str, float]]:
    """Return pools on which nothing was tuned: name, engines, load, and its share of their rate."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        engines = tuple(
            Engine(
                rng.choice((0.008, 0.015, 0.025, 0.04, 0.06, 0.1)),
                rng.choice((300, 600, 1200, 2500, 5000)),
            )
            for _ in range(rng.randint(2, 6))
        )
        share, load = rng.choice((0.5, 0.7, 0.85, 1.0)), rng.choice(("mixed", "shared"))
        found.append((f"random {seed}.{number}", engines, load, share))
    return found


def routing(
    num_requests: int, share: float, seeds: Sequence[int], pools: tuple[int, int]
) -> dict[str, Any]:
    """Return goodput of each policy by pool and load, and ratios of the gateway's.

    Args:
        share: load of a pool of ``POOLS`` as a share of its capacity.
        pools: number of random pools in addition to those, and their seed.
    """
    rows: dict[str, Any] = {}
    asked = [(name, engines, load, share) for name, engines in POOLS.items()
             for load in ("mixed", "shared")]  # fmt: skip
    asked += random_pools(*pools)
    runs = [
        (engines, load, name, num_requests, share, seed)
        for _, engines, load, share in asked
        for name in _POLICIES
        for seed in seeds
    ]
    with ProcessPoolExecutor() as processes:
        found = processes.map(_run, *zip(*runs, strict=True))
        for pool_name, _, load, share in asked:
            goodput = {name: _mean(next(found) for _ in seeds) for name in _POLICIES}
            rows[f"{pool_name}, {load} at {share:g}"] = row = _row(goodput)
            print(f"  {pool_name}, {load} at {share:g}: {row}", file=sys.stderr, flush=True)
    first = [row for name, row in rows.items() if name.startswith("10-20-40-80")]
    return {
        "vs_round_robin": min(row["vs_round_robin"] for row in first),
        "vs_best_other": min(row["vs_best_other"] for row in rows.values()),
        "rows": rows,
    }


def _row(goodput: Mapping[str, float]) -> dict[str, float]:
    """Return each policy's goodput on one pool and load, and ratios of the gateway's worst."""
    others = {n: v for n, v in goodput.items() if not n.startswith("predicted")}
    ours = min(v for n, v in goodput.items() if n.startswith("predicted"))
    return {
        **{name: round(value, 3) for name, value in goodput.items()},
        "vs_round_robin": round(ours / max(1e-9, goodput["round-robin"]), 2),
        "vs_best_other": round(ours / max(1e-9, max(others.values())), 3),
    }


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _router(name: str) -> Router:
    match name.split():
        case ["predicted", seconds, _]:
            return PredictedRouter(staleness=float(seconds))
        case ["round-robin"]:
            return RoundRobin()
        case ["prefix-affinity"]:
            return PrefixAffinity()
    return LeastOutstanding()


def _run(
    engines: Sequence[Engine], load: str, router: str, count: int, share: float, seed: int
) -> float:
    specs = [
        ReplicaSpec(
            ReplicaConfig(
                scheduler=SchedulerConfig(
                    max_num_seqs=_SEQUENCES, max_num_batched_tokens=2048, max_model_len=8192
                ),
                cache=CacheConfig(block_size=BLOCK, num_blocks=engine.blocks),
            ),
            FixedStepTimes(engine.step, engine.step * _PER_TOKEN),
        )
        for engine in engines
    ]
    served: list[Served] = []
    rate = share * sum(engine.rate for engine in engines)
    simulator = Simulator(Pool(specs, _router(router)), served.append, prefix_block=_PREFIX_BLOCK)
    simulator.run(_arrivals(load, rate, count, seed))
    return sum(map(_good, served)) / count


def _good(served: Served) -> bool:
    arrival = served.arrival
    ttft, tpot = served.ttft, served.tpot
    return (
        not served.refused
        and ttft is not None
        and (arrival.ttft is None or ttft <= arrival.ttft)
        and (arrival.tpot is None or tpot is None or tpot <= arrival.tpot)
    )


def _arrivals(load: str, rate: float, count: int, seed: int) -> Iterator[Arrival]:
    rng = random.Random(seed)
    at = 0.0
    for number in range(count):
        at += rng.expovariate(rate)
        output = max(8, min(512, round(rng.lognormvariate(4.6, 0.7))))
        # half want tokens fast, as if read while they arrive; the others have looser targets
        tight = rng.random() < 0.5
        ttft, tpot = (1.0, 0.05) if tight else (4.0, 0.12)
        prefix: tuple[int, ...] = (-number - 1,)
        if load == "mixed":
            prompt = max(16, round(rng.lognormvariate(5.8, 0.6)))
        else:
            which = rng.randrange(4) if rng.random() < 0.5 else rng.randrange(16)
            prefix = tuple(100 * which + piece for piece in range(4))
            prompt = 4 * _PREFIX_BLOCK + rng.randrange(16, 200)
        yield Arrival(at, prompt, output, prefix=prefix, ttft=ttft, tpot=tpot)
