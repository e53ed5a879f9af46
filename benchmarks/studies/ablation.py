"""Each feature of the scheduler off in turn: what it is worth when it is needed.

A two-core CPU that serves a 135M model: 4 ms a step, 0.4 ms a token, 1 us a key read. A third of
the requests each is interactive (TTFT 1 s, TPOT 100 ms), standard (3 s, 150 ms) and batch (best
effort, done within 60 s). Two situations: *bursts* (gamma gaps, cv 4, about the rate that the
machine can do), and *little memory* (a cache for 6 average requests, Poisson).
"""

from __future__ import annotations

from typing import Any

from benchmarks.studies.common import Study
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.routing.routers import LeastOutstanding
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report import Metrics, text_table
from paceline.sim.simulator import Pool, ReplicaSpec, Simulator
from paceline.sim.workload import open_workload

__all__ = ["BASELINE", "CPU", "STUDY"]

WORKLOAD = (
    "synthetic:rate={},cv={},prompt=lognormal(255,0.6),output=lognormal(40,0.8),n=600,"
    "classes=interactive(1,ttft=1,tpot=100ms)+standard(1,ttft=3,tpot=150ms)+batch(1,deadline=60)"
)
SITUATIONS: dict[str, tuple[str, int]] = {
    "bursts": (WORKLOAD.format(6, 4), 8000),
    "little-memory": (WORKLOAD.format(5, 1), 160),
}
BASELINE: dict[str, Any] = {
    "policy": "fcfs",
    "adaptive_token_budget": False,
    "max_num_batched_tokens": 512,
    "relegate_late": False,
    "pace_admission": False,
    "future_memory_check": False,
    "preemption": "recompute",
    "pressure_threshold": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "everything on": {},
    "no adaptive budget": {"adaptive_token_budget": False, "max_num_batched_tokens": 512},
    "no bound of gaps": {"max_token_gap_s": None},
    "no triage": {"relegate_late": False},
    "no pace guard": {"pace_admission": False},
    "no future memory": {"future_memory_check": False},
    "no swap": {"preemption": "recompute"},
    "no pressure valve": {"pressure_threshold": 1.0},
    "fcfs order": {"policy": "fcfs"},
    "all of it off": BASELINE,
}
CLASSES = ("interactive", "standard", "batch")


class _Cpu:
    """See the module."""

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = sum(start + num_tokens / 2 for _, start, num_tokens, _, _ in plan.rows)
        return 0.004 + 4e-4 * plan.num_tokens + 1e-6 * keys


CPU = _Cpu()


def _row(name: str, options: dict[str, Any], workload: str, num_blocks: int) -> list[str]:
    settings: dict[str, Any] = {
        "policy": "deadline",
        "max_model_len": 4096,
        "pressure_threshold": 0.88,
    }
    config = ReplicaConfig(
        scheduler=SchedulerConfig(**(settings | options)),
        cache=CacheConfig(
            block_size=16,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            num_host_blocks=num_blocks // 2,
            swap_block_seconds=1e-4,
        ),
    )
    metrics = Metrics()
    pool = Pool((ReplicaSpec(config, CPU),), LeastOutstanding())
    totals = Simulator(pool, metrics.add).run(open_workload(workload, seed=3))
    summary = metrics.summary(name)
    attained = [f"{100 * summary.by_class[each].attainment:.0f}" for each in CLASSES]
    assert summary.ttft is not None
    return [
        name,
        f"{100 * summary.attainment:.1f}",
        *attained,
        f"{summary.ttft.p50:.2f}",
        str(totals.num_preemptions),
        str(totals.num_refused),
    ]


def tables() -> dict[str, str]:
    """Per cent within targets, seconds, counts."""
    head = ["", "attainment %", *CLASSES, "TTFT p50", "preemptions", "refused"]
    return {
        situation: text_table(
            [head, *(_row(name, options, *setting) for name, options in VARIANTS.items())]
        )
        for situation, setting in SITUATIONS.items()
    }


STUDY = Study("ablation", tables)
