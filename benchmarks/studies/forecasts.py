"""Forecasts of the first token on arrival, compared with the outcomes and with the best possible.

The two-core CPU of the ablation, with steps that take a random factor (10 %) and lengths that have
to be learned. 16 slots, so that requests wait: chats with targets, priorities and three tenants,
in Poisson arrivals and in bursts, which never end. The floor comes from futures, drawn from the
moment of the promise on (``futures``): the median and the mean of FUTURES of them.

Then mixes of ``benchmarks/overload`` in which forecasts are hardest, by their laws of arrival, as
served there: the factor within which nine in ten forecasts of served requests lie, and the same of
the median of the futures in which the request is served.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.overload.judging import Ratios
from benchmarks.overload.mixes import MIXES, config_of, stream_of
from benchmarks.studies.ablation import CPU, LENGTHS, Noisy
from benchmarks.studies.bound import Steps
from benchmarks.studies.common import Study
from benchmarks.studies.futures import Promise, Run
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.arrival import Arrival
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY", "mixed_run_of", "run_of"]

POLICIES: Final = ("fcfs", "deadline", "sjf", "fair", "priority")
ARRIVALS: Final = {"poisson": "rate=6,cv=1", "bursts": "rate=5,cv=3"}
# more requests than any run takes
WORKLOAD: Final = (
    "synthetic:{},{},n=1000000,classes=a(1,priority=0)+b(1,priority=1)+c(1,priority=2),"
    "tenants=x(6)+y(2)+z(1)"
)
# other seeds than those on which constants were chosen
SEEDS: Final = range(21, 25)
# requests that are judged: after lengths and the bias were learned from the first ones
JUDGED: Final = range(100, 600)
# one in this many of them has futures drawn, and the number of these
EVERY: Final = 50
FUTURES: Final = 9
# seconds of a step: smaller errors do not count
STEP: Final = 0.05

# mixes and the requests that are judged in them, of which one in so many has futures drawn
MIXED: Final = (
    "three classes",
    "three classes, bursts",
    "chats, bursts",
    "prompts of 10 to 4,000",
    "prompts of 10 to 4,000, three classes",
    "three priorities",
)
MIXED_SEEDS: Final = range(21, 23)
MIXED_JUDGED: Final = range(500, 1000)
MIXED_EVERY: Final = 10
# limit of the factor, unless that of the futures times the second is more
LIMITS: Final = 1.6, 1.25

# predicted and actual seconds, and the median and the mean of the futures, if any were drawn
_Row = tuple[float, float, float, float]


def run_of(
    policy: str, kind: str, seed: int, *, judged: range = JUDGED, num_futures: int = 0
) -> list[Promise]:
    """Return the promises of one run, with their outcomes."""
    settings: dict[str, Any] = {"policy": policy, "max_num_seqs": 16, "max_model_len": 4096}
    if policy == "deadline":
        settings |= {"default_ttft_s": 1.0, "default_tpot_s": 0.1}
    config = ReplicaConfig(
        scheduler=SchedulerConfig(**settings),
        cache=CacheConfig(block_size=16, num_blocks=8000, enable_prefix_caching=False),
        max_tokens=512,
    )
    return Run(
        partial(_arrivals, WORKLOAD.format(ARRIVALS[kind], LENGTHS)),
        config,
        Noisy(CPU, random.Random(seed)),
        seed=seed,
        judged=judged,
        # other requests in every run
        sampled=lambda number: number % EVERY == 7 * seed % EVERY,
        num_futures=num_futures,
    ).serve()


def _arrivals(spec: str, seed: int) -> Iterable[Arrival]:
    return open_workload(spec, seed=seed)


def mixed_run_of(
    name: str, seed: int, *, judged: range = MIXED_JUDGED, num_futures: int = 0
) -> list[Promise]:
    """Return the promises of a run of a mix to requests that are served, with their outcomes."""
    mix = MIXES[name]
    return Run(
        lambda seed: stream_of(mix, seed, "n=1000000"),
        config_of(mix),
        Steps(),
        seed=seed,
        judged=judged,
        sampled=lambda number: number % MIXED_EVERY == 7 * seed % MIXED_EVERY,
        num_futures=num_futures,
    ).serve()


def _job(job: tuple[str, str, int]) -> list[_Row]:
    return _rows_of(run_of(*job, num_futures=FUTURES))


def _mixed_job(job: tuple[str, int]) -> list[_Row]:
    return _rows_of(mixed_run_of(*job, num_futures=FUTURES))


def _rows_of(promises: Iterable[Promise]) -> list[_Row]:
    found = []
    for promise in promises:
        futures = promise.futures or [float("nan")]
        middle, mean = float(np.median(futures)), float(np.mean(futures))
        found.append((promise.predicted, promise.actual, middle, mean))
    return found


def _errors(said: NDArray[np.float64], came: NDArray[np.float64]) -> list[str]:
    """Return median and 90th percentile of the errors, and the bias, in per cent."""
    off = np.maximum(0.0, np.abs(said - came) - STEP) / came
    median, most = 100 * np.percentile(off, [50, 90])
    bias = 100 * (said.sum() / came.sum() - 1.0)
    return [f"{median:.0f}", f"{most:.0f}", f"{bias:+.0f}"]


def _rows(policy: str, runs: Sequence[list[_Row]]) -> tuple[list[str], list[str]]:
    """Return the rows for all promises, and for those with futures."""
    pairs = np.array([row for run in runs for row in run])
    said, came, middle, mean = pairs.T
    drawn = ~np.isnan(middle)
    floor = [policy]
    for forecast in (said, middle, mean):
        floor += _errors(forecast[drawn], came[drawn])
    return [policy, f"{came.mean():.2f}", *_errors(said, came)], floor


def _mixed_row(name: str, runs: Sequence[list[_Row]]) -> list[str]:
    """Return the row of a mix: factors of all promises, and those of the futures."""
    pairs = np.array([row for run in runs for row in run])
    said, came, middle, _ = pairs.T
    drawn = ~np.isnan(middle)
    own = Ratios.of((said / came).tolist())
    floor = Ratios.of((middle[drawn] / came[drawn]).tolist())
    limit = max(LIMITS[0], LIMITS[1] * (floor.p90 or 0.0))
    cells = own.num, own.p50, own.p90, floor.num, floor.p50, floor.p90
    return [name, f"{came.mean():.2f}", *(f"{each:.4g}" for each in cells), f"{limit:.3g}"]


def tables() -> dict[str, str]:
    """Return tables of seconds, and of errors in per cent of the actual time or as factors."""
    jobs = [(policy, kind, seed) for policy in POLICIES for kind in ARRIVALS for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        mixed_jobs = [(name, seed) for name in MIXED for seed in MIXED_SEEDS]
        mixed = dict(zip(mixed_jobs, executor.map(_mixed_job, mixed_jobs), strict=True))
        results = dict(zip(jobs, executor.map(_job, jobs), strict=True))
    errors = ("p50 %", "p90 %", "bias %")
    found: dict[str, str] = {}
    for kind in ARRIVALS:
        head = ["policy", "TTFT mean", *(f"error {each}" for each in errors)]
        head[-1] = errors[-1]
        rows, floors = zip(
            *(_rows(p, [results[p, kind, seed] for seed in SEEDS]) for p in POLICIES), strict=True
        )
        found[kind] = text_table([head, *rows])
        head = ["policy", *(f"{who} {e}" for who in ("said", "median", "mean") for e in errors)]
        found[f"{kind}-floor"] = text_table([head, *floors])
    head = ["mix", "TTFT mean", "served", "said p50", "said p90", "with futures", "median p50"]
    head += ["median p90", "limit"]
    lines = [_mixed_row(n, [mixed[n, seed] for seed in MIXED_SEEDS]) for n in MIXED]
    found["mixes"] = text_table([head, *lines])
    return found


STUDY = Study("forecasts", tables)
