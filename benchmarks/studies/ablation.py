"""Each mechanism of the scheduler off in turn: what it is worth when it is needed.

A two-core CPU that serves a 135M model: 4 ms a step, 0.4 ms a token, 1 us a key read; and the
textbook GPU of the other studies where the memory-bound region is the question. A third of the
requests each is interactive (TTFT 1 s, TPOT 100 ms), standard (3 s, 150 ms) and batch (best effort,
done within 60 s), and a fourth class has no targets at all, or what the situation says. Steps take
what they are predicted to take, times a random factor (10 %). ``max_tokens`` is 512 for all, so
lengths have to be learned.

A run lasts one to two minutes, since each is made for many switches, situations and seeds; what
becomes of a queue that grows for longer is shown by ``make bench NAME=overload``.

Every run is made with and without the mechanism for the same arrivals, over ``SEEDS`` of them: the
tables give the mean difference (off minus on) and its standard error.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.studies.common import GPU, Study
from benchmarks.studies.switches import SWITCHES, Switch
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.routing.routers import LeastOutstanding
from paceline.sim.live import DecisionLog
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.table import text_table
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import StepTimes
from paceline.sim.workload.spec import open_workload

__all__ = [
    "BASELINE",
    "CPU",
    "LENGTHS",
    "SITUATIONS",
    "STUDY",
    "Noisy",
    "Situation",
    "plans_of",
    "same_plans",
]

SEEDS: Final = range(1, 7)
NUM_REQUESTS: Final = 500
LENGTHS = "prompt=lognormal(255,0.6),output=lognormal(40,0.8)"
CLASSES = (
    "classes=interactive(1,ttft=1,tpot=100ms)+standard(1,ttft=3,tpot=150ms)+batch(1,deadline=60)"
)
SOON = CLASSES.replace("deadline=60", "deadline=30")
# what is left with everything off
BASELINE: dict[str, Any] = {
    "policy": "fcfs",
    "adaptive_token_budget": False,
    "max_num_batched_tokens": 512,
    "demote_late": False,
    "pace_admission": False,
    "future_memory_check": False,
    "preemption": "recompute",
    "pressure_threshold": 1.0,
}


class _Cpu:
    """See the module."""

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = sum(start + num_tokens / 2 for _, start, num_tokens, _, _ in plan.rows)
        return 0.004 + 4e-4 * plan.num_tokens + 1e-6 * keys


CPU = _Cpu()


class _Rows:
    """The capacity study's, where a row of one token takes as long as two tokens of a prompt."""

    def seconds(self, plan: SchedulerOutput) -> float:
        narrow = sum(num_tokens == 1 for _, _, num_tokens, _, _ in plan.rows)
        return 0.004 + 3.9e-4 * (plan.num_tokens - narrow) + 8.5e-4 * narrow


@dataclass(frozen=True, slots=True)
class Noisy:
    """Steps take what ``times`` says, times a random factor."""

    times: StepTimes
    random: random.Random

    def seconds(self, plan: SchedulerOutput) -> float:
        return self.times.seconds(plan) * math.exp(0.1 * self.random.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Situation:
    """Requests, and the machine that serves them."""

    workload: str
    num_blocks: int = 8000
    times: StepTimes = CPU
    settings: Mapping[str, Any] = field(default_factory=dict)


SITUATIONS: Final[Mapping[str, Situation]] = {
    "poisson": Situation(f"rate=7,cv=1,{LENGTHS},{CLASSES}"),
    "bursts": Situation(f"rate=6,cv=4,{LENGTHS},{CLASSES}"),
    "little-memory": Situation(f"rate=5,cv=1,{LENGTHS},{CLASSES}", num_blocks=160),
    "little-memory-bursts": Situation(f"rate=4,cv=4,{LENGTHS},{CLASSES}", num_blocks=160),
    # batch work is due within 30 s, and there is more to do than can be done
    "beyond-capacity": Situation(f"rate=8,cv=1,{LENGTHS},{SOON}", times=_Rows()),
    "beyond-capacity-bursts": Situation(f"rate=7,cv=4,{LENGTHS},{SOON}", times=_Rows()),
    "streams": Situation(
        "rate=12,cv=1,prompt=lognormal(40,0.6),output=lognormal(120,0.6),"
        "classes=stream(2,ttft=2,tpot=25ms)+standard(1)+best-effort(1)",
    ),
    # more than the machine can do, and a third of it without targets
    "overload": Situation(
        f"rate=9,cv=2,{LENGTHS},classes=interactive(1,ttft=1,tpot=100ms)+tight(1,ttft=0.4)"
        "+batch(1,deadline=30)+standard(2)+best-effort(1)",
        settings={"max_predicted_ttft_s": 8.0, "queue_timeout_s": 16.0},
    ),
    "tenants": Situation(
        f"rate=9,cv=4,{LENGTHS},classes=chat(1,ttft=3,tpot=100ms)+standard(1),"
        "tenants=flood(12)+light(1)+other(1)",
        settings={"policy": "fair", "max_num_waiting": 32},
    ),
    "gpu": Situation(
        "rate=38,cv=1,prompt=lognormal(255,0.8),output=lognormal(60,0.8)",
        num_blocks=20_000,
        times=GPU,
        settings={"policy": "fcfs", "max_num_batched_tokens": 2048, "max_num_seqs": 64},
    ),
}
# of ``paceline serve`` on waiting
_LIMITS: Final = {"max_predicted_ttft_s": 30.0, "queue_timeout_s": 60.0}
# seconds and shares that the tables show: (head, digits)
_COLUMNS: Final = (
    ("attainment %", 1),
    ("TTFT p50 ms", 0),
    ("TTFT p99 s", 2),
    ("TPOT p99 ms", 1),
    ("E2E mean s", 2),
    ("tokens/s", 1),
    ("preemptions", 0),
    ("refused", 0),
)


def _run(
    situation: Situation,
    switch: Switch,
    seed: int,
    num_requests: int,
    watch: Callable[[str], None] | None = None,
) -> tuple[str, list[float]]:
    """The digest of all decisions, and the columns. ``watch`` is given the digest after each
    plan; what it raises ends the run."""
    settings: dict[str, Any] = {"policy": "deadline", "max_model_len": 4096, **_LIMITS}
    num_blocks = situation.num_blocks
    with switch.off():
        config = ReplicaConfig(
            scheduler=SchedulerConfig(
                **(settings | dict(situation.settings) | dict(switch.settings))
            ),
            cache=CacheConfig(
                block_size=16,
                num_blocks=num_blocks,
                enable_prefix_caching=False,
                num_host_blocks=num_blocks // 2,
                swap_block_seconds=1e-4,
            ),
            max_tokens=512,
        )
        times = Noisy(situation.times, random.Random(seed))
        metrics, log = Metrics(), DecisionLog()

        def on_plan(_: int, plan: SchedulerOutput, made: float, *__: float) -> None:
            log.add(plan, made)
            if watch is not None:
                watch(log.digest())

        pool = Pool((ReplicaSpec(config, times),), LeastOutstanding())
        workload = f"synthetic:{situation.workload},n={num_requests}"
        totals = Simulator(pool, metrics.add, on_plan=on_plan).run(
            open_workload(workload, seed=seed)
        )
    summary = metrics.summary()
    ttft, tpot, e2e = summary.ttft, summary.tpot, summary.e2e
    assert ttft is not None and tpot is not None and e2e is not None
    return log.digest(), [
        100 * summary.attainment,
        1e3 * ttft.p50,
        ttft.p99,
        1e3 * tpot.p99,
        e2e.mean,
        summary.token_rate,
        totals.num_preemptions,
        totals.num_refused,
    ]


def plans_of(situation: str, switch: Switch) -> list[str]:
    """A digest after every plan that is made for the last seed's arrivals."""
    digests: list[str] = []
    _run(SITUATIONS[situation], switch, SEEDS[-1], NUM_REQUESTS, digests.append)
    return digests


class _OtherPlanError(Exception):
    """A plan is not the one that it was compared with."""


def same_plans(situation: str, switch: Switch, plans: Sequence[str]) -> bool:
    """Whether ``plans_of`` says the same. Ends with the first plan that differs."""
    place = itertools.count()

    def compare(digest: str) -> None:
        index = next(place)
        if index >= len(plans) or digest != plans[index]:
            raise _OtherPlanError

    try:
        _run(SITUATIONS[situation], switch, SEEDS[-1], NUM_REQUESTS, compare)
    except _OtherPlanError:
        return False
    return next(place) == len(plans)


def _job(job: tuple[str, str, int]) -> tuple[str, list[float]]:
    situation, name, seed = job
    switch = Switch(BASELINE) if name == "all off" else SWITCHES.get(name, Switch())
    return _run(SITUATIONS[situation], switch, seed, NUM_REQUESTS)


def _row(
    name: str, on: Sequence[tuple[str, list[float]]], off: Sequence[tuple[str, list[float]]]
) -> list[str] | None:
    """Differences and their standard errors; None if no plan differs."""
    if all(a[0] == b[0] for a, b in zip(on, off, strict=True)):
        return None
    cells = [name]
    for index, (_, digits) in enumerate(_COLUMNS):
        differences = [b[1][index] - a[1][index] for a, b in zip(on, off, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        mean = statistics.mean(differences)
        bold = "**" if abs(mean) > 2 * error and round(abs(mean), digits) > 0 else ""
        cells.append(f"{bold}{mean:+.{digits}f}{bold} ± {error:.{digits}f}")
    return cells


def tables() -> dict[str, str]:
    """Per situation: the means with everything on, then differences by mechanism."""
    names = ["everything on", "all off", *SWITCHES]
    jobs = [(s, name, seed) for s in SITUATIONS for name in names for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        results = dict(zip(jobs, executor.map(_job, jobs, chunksize=4), strict=True))
    found: dict[str, str] = {}
    for situation in SITUATIONS:
        of = {name: [results[situation, name, seed] for seed in SEEDS] for name in names}
        on = of.pop("everything on")
        means = [statistics.mean(column) for column in zip(*(run for _, run in on), strict=True)]
        rows = [
            ["off", *(head for head, _ in _COLUMNS)],
            ["none", *(f"{m:.{d}f}" for m, (_, d) in zip(means, _COLUMNS, strict=True))],
        ]
        same: list[str] = []
        for name, off in of.items():
            row = _row(name, on, off)
            if row is None:
                same.append(name)
            else:
                rows.append(row)
        found[situation] = text_table(rows)
        if same:
            found[situation] += f"\n\nThe same plans without: {', '.join(same)}."
    return found


STUDY = Study("ablation", tables)
