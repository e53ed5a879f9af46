"""Fleets in the simulator, driven by the controller of ``paceline fleet``: a day on which the pool
grows and shrinks, and an update of a thousand replicas."""

from __future__ import annotations

import csv
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.common.load import TRACE
from benchmarks.common.processes import Unavailable
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.fleet.controller import Scale, Spec
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import ReplicaConfig
from paceline.sim.fleet import FleetRouter
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes

__all__ = ["autoscale", "thousand"]

_START_SECONDS = 60.0
# limits by which requests are judged; they have no targets of their own, so steps are not paced
_TTFT, _TPOT = 2.0, 0.25
# trough to peak of the day, and bursts: their middle as a share of the day, seconds, and factor
_TROUGH = 0.25
_BURSTS = ((0.3, 180.0, 1.5), (0.8, 180.0, 1.5))
_ATTAINMENT = 0.99
_STEP, _PER_TOKEN = 0.1, 0.0001
_SLOTS = 16


def _specs(count: int, num_blocks: int = 4000) -> list[ReplicaSpec]:
    config = ReplicaConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=_SLOTS, max_num_batched_tokens=1024, max_model_len=16384
        ),
        cache=CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=False),
    )
    return [ReplicaSpec(config, FixedStepTimes(_STEP, _PER_TOKEN)) for _ in range(count)]


def _lengths() -> list[tuple[int, int]]:
    """Return prompt and output tokens of the trace's requests."""
    if not TRACE.exists():
        raise Unavailable(f"{TRACE.name} is not here")
    with open(TRACE, newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    return [(max(1, int(row[names[1]])), max(1, int(row[names[2]]))) for row in rows]


def rate_at(at: float, seconds: float, peak: float) -> float:
    """Return the requests a second of a day's moment: a long night at its ends, noon in the
    middle."""
    share = 0.5 - 0.5 * math.cos(2.0 * math.pi * at / seconds)
    rate = peak * (_TROUGH + (1.0 - _TROUGH) * share * share)
    for middle, length, factor in _BURSTS:
        if abs(at - middle * seconds) < 0.5 * length:
            rate *= factor
    return rate


def _day(seconds: float, peak: float, seed: int) -> Iterator[Arrival]:
    draw, lengths = random.Random(seed), _lengths()
    most = peak * max(1.0, *(factor for _, _, factor in _BURSTS))
    at = 0.0
    while True:
        at += draw.expovariate(most)
        if at >= seconds:
            return
        if draw.random() < rate_at(at, seconds, peak) / most:
            prompt, output = draw.choice(lengths)
            yield Arrival(at, min(prompt, 8000), min(output, 800))


def _attained(served: list[Served]) -> float:
    good = sum(
        not each.refused
        and each.ttft is not None
        and each.ttft <= _TTFT
        and (each.tpot is None or each.tpot <= _TPOT)
        for each in served
    )
    return good / max(1, len(served))


def _run(spec: Spec, places: int, arrivals: Iterator[Arrival]) -> tuple[float, FleetRouter, int]:
    router = FleetRouter(spec, start_seconds=_START_SECONDS, seed=1)
    served: list[Served] = []
    Simulator(Pool(_specs(places), router), served.append).run(arrivals)
    return _attained(served), router, len(served)


def _at_peak(peak: float, seconds: float = 900.0) -> Iterator[Arrival]:
    """A quarter of an hour at the peak alone."""
    draw, lengths = random.Random(0), _lengths()
    at = 0.0
    while (at := at + draw.expovariate(peak)) < seconds:
        prompt, output = draw.choice(lengths)
        yield Arrival(at, min(prompt, 8000), min(output, 800))


def _fewest(peak: float) -> int:
    """Return the fewest replicas that hold the targets at the peak."""
    # fewer have not enough slots for the requests that there are on average
    running = peak * _STEP * fmean(min(output, 800) for _, output in _lengths())
    most = max(1, math.floor(running / _SLOTS))
    while _run(Spec(most, version="v"), most, _at_peak(peak))[0] < _ATTAINMENT:
        most += 1
    return most


def autoscale(
    hours: float = 24.0, seeds: Sequence[int] = (0,), peak: float = 4.0
) -> dict[str, Any]:
    """Return for days by these seeds attainment and replica hours of a pool that scales, next to
    one fixed at the fewest that hold the targets at the peak; the totals are the worst of them."""
    seconds, most = 3600.0 * hours, _fewest(peak)
    spec = Spec(
        max(1, math.ceil(_TROUGH * most)), version="v", drain_seconds=600.0,
        scale=Scale(1, most, _TTFT),
    )  # fmt: skip
    days: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        scaled, router, count = _run(spec, most + 1, _day(seconds, peak, seed))
        days[seed] = {
            "requests": count,
            "attainment": round(scaled, 4),
            "replica_hours": round(router.replica_seconds / (most * seconds), 4),
            "changes": len(router.sizes),
        }
        print(
            f"  autoscale, at most {most}, seed {seed}: {days[seed]}", file=sys.stderr, flush=True
        )
    for seed, day in days.items():
        fixed, _, _ = _run(Spec(most, version="v"), most, _day(seconds, peak, seed))
        day |= {"attainment_at_max": round(fixed, 4), "ratio": round(day["attainment"] / fixed, 4)}
        print(f"  autoscale, seed {seed}: {day}", file=sys.stderr, flush=True)
    return {
        "max": most,
        "ratio": min(day["ratio"] for day in days.values()),
        "replica_hours": max(day["replica_hours"] for day in days.values()),
        "days": days,
    }


def thousand(
    replicas: int = 1000, requests: int = 20_000, kills: int = 50, seed: int = 0
) -> dict[str, Any]:
    """Return the seconds that a simulation of an update takes, and its requests; each has 20 steps.
    ``kills`` replicas are killed meanwhile, each time the one that has most requests."""
    draw = random.Random(seed)
    rate = 20.0 * replicas / 100.0
    arrivals, at = [], 0.0
    for _ in range(requests):
        at += draw.expovariate(rate)
        arrivals.append(Arrival(at, 100, 20))
    old = Spec(replicas, version="v1", surge=max(1, replicas // 5), drain_seconds=600.0)
    router = FleetRouter(
        old, start_seconds=2.0, changes={at / 8: replace(old, version="v2")}, seed=seed
    )
    served: list[Served] = []
    began, used = time.perf_counter(), time.process_time()
    pool = Pool(_specs(replicas + old.surge, 200), router)
    times = [at * (kill + 1) / (kills + 1) for kill in range(kills)]
    simulator = Simulator(pool, served.append, kills=times)
    simulator.run(iter(arrivals))
    took, used = time.perf_counter() - began, time.process_time() - used
    versions = [each.version for each in router.controller.replicas.values()]
    return {
        "seconds": round(took, 1),
        "processor_seconds": round(used, 1),
        "requests": len(served),
        "refused": sum(each.refused for each in served),
        "kills": kills,
        "resumed": simulator.num_resumed,
        "lost": sum(each.output_tokens < 20 for each in served),
        "doubled": sum(each.output_tokens > 20 for each in served),
        "updated": versions.count("v2"),
    }
