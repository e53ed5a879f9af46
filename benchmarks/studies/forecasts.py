"""Forecasts of the first token on arrival, compared with the outcomes and with the best possible.

The two-core CPU of the ablation, with steps that take a random factor (10 %) and lengths that have
to be learned. 16 slots, so that requests wait: chats with targets, priorities and three tenants,
in Poisson arrivals and in bursts, which never end. The floor comes from futures, drawn from the
moment of the promise on (``futures``): the median and the mean of FUTURES of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.ablation import CPU, LENGTHS, Noisy
from benchmarks.studies.common import Study
from benchmarks.studies.futures import Promise, Run
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.table import text_table

__all__ = ["STUDY", "run_of"]

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
        WORKLOAD.format(ARRIVALS[kind], LENGTHS),
        config,
        Noisy(CPU, random.Random(seed)),
        seed=seed,
        judged=judged,
        # other requests in every run
        sampled=lambda number: number % EVERY == 7 * seed % EVERY,
        num_futures=num_futures,
    ).serve()


def _job(job: tuple[str, str, int]) -> list[_Row]:
    found = []
    for promise in run_of(*job, num_futures=FUTURES):
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


def tables() -> dict[str, str]:
    """Return tables of seconds, and of errors in per cent of the actual time."""
    jobs = [(policy, kind, seed) for policy in POLICIES for kind in ARRIVALS for seed in SEEDS]
    with ProcessPoolExecutor(os.cpu_count()) as executor:
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
    return found


STUDY = Study("forecasts", tables)
