"""What the server says of the first token on arrival, and what becomes of it, by policy.

The two-core CPU of the ablation, with steps that take a random factor (10 %) and lengths that have
to be learned. 16 places, so that requests wait: chats with targets, priorities and three tenants,
in Poisson arrivals and in bursts.
"""

from __future__ import annotations

import random
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from benchmarks.studies.ablation import CPU, LENGTHS, Noisy
from benchmarks.studies.common import Study
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.request import Request
from paceline.sim.arrival import Served
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report import text_table
from paceline.sim.simulator import Pool, Simulator
from paceline.sim.workload import open_workload

__all__ = ["STUDY"]

POLICIES: Final = ("fcfs", "deadline", "sjf", "fair", "priority")
ARRIVALS: Final = {"poisson": "rate=6,cv=1", "bursts": "rate=5,cv=3"}
WORKLOAD: Final = (
    "synthetic:{},{},n=600,classes=a(1,priority=0)+b(1,priority=1)+c(1,priority=2),"
    "tenants=x(6)+y(2)+z(1)"
)
SEEDS: Final = range(1, 5)
# requests that are judged: after the first have taught lengths and the bias
FIRST: Final = 100
# seconds; what is off by less than a step or so is not off
STEP: Final = 0.05


def _pairs(policy: str, arrivals: str, seed: int) -> list[tuple[float, float]]:
    """(predicted, real) seconds to the first token, of requests that no policy refused."""
    said: dict[float, float | None] = {}
    note = FirstTokenForecast.note

    def noted(self: FirstTokenForecast, request: Request) -> float | None:
        said[request.asked.arrival_time] = predicted = note(self, request)
        return predicted

    settings: dict[str, Any] = {"policy": policy, "max_num_seqs": 16, "max_model_len": 4096}
    if policy == "deadline":
        settings |= {"default_ttft_s": 1.0, "default_tpot_s": 0.1}
    config = ReplicaConfig(
        scheduler=SchedulerConfig(**settings),
        cache=CacheConfig(block_size=16, num_blocks=8000, enable_prefix_caching=False),
        max_tokens=512,
    )
    served: list[Served] = []
    times = Noisy(CPU, random.Random(seed))
    with patch.object(FirstTokenForecast, "note", noted):
        workload = open_workload(WORKLOAD.format(arrivals, LENGTHS), seed=seed)
        Simulator(Pool.single(config, times), served.append).run(workload)
    served.sort(key=lambda each: each.arrival.at)
    found = []
    for each in served[FIRST:]:
        predicted = said.get(each.arrival.at)
        if predicted is not None and each.ttft is not None:
            found.append((predicted, each.ttft))
    return found


def _row(policy: str, kind: str) -> list[str]:
    pairs = np.array([p for seed in SEEDS for p in _pairs(policy, ARRIVALS[kind], seed)])
    predicted, real = pairs[:, 0], pairs[:, 1]
    off = np.maximum(0.0, np.abs(predicted - real) - STEP) / real
    bias = predicted.sum() / real.sum() - 1.0
    median, most = 100 * np.percentile(off, [50, 90])
    return [policy, f"{np.mean(real):.2f}", f"{median:.0f}", f"{most:.0f}", f"{100 * bias:+.0f}"]


def tables() -> dict[str, str]:
    """Seconds, and errors in per cent of what it took."""
    head = ["policy", "TTFT mean", "error p50 %", "error p90 %", "bias %"]
    return {
        kind: text_table([head, *(_row(policy, kind) for policy in POLICIES)]) for kind in ARRIVALS
    }


STUDY = Study("forecasts", tables)
