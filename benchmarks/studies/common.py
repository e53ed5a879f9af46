"""Code shared by the studies: a machine, a run, and the shape of a study.

The machine is a textbook GPU, so that every number on the pages can be checked by hand; it is not
a prediction of a real server (docs/understand/simulator.md says how those are made). One GPU with
80 GB serves Llama-3.1-8B in bfloat16. A step takes::

    host + max(2 * parameters * tokens / FLOP/s, weight bytes / bandwidth) + KV bytes / bandwidth

with H100 SXM's data sheet figures times the share of them that kernels usually reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.routing.routers import LeastOutstanding
from paceline.sim.arrival import Arrival
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.steps import StepWatcher
from paceline.sim.simulator import Simulator, Totals
from paceline.sim.step_times.base import StepTimes
from paceline.sim.step_times.models import ModelShape

__all__ = ["GPU", "KV_BYTES", "PLAIN", "Machine", "Run", "Study", "replica", "serve"]

_MODEL = ModelShape.named("Llama-3.1-8B")
_PARAMETERS = _MODEL.num_parameters
# bytes of one token's keys and values, in bfloat16
KV_BYTES = _MODEL.kv_bytes_per_token()
BLOCK_SIZE = 16
# the textbooks' scheduler: chunked prefill, first come first served, and no forecasts
PLAIN: dict[str, Any] = {
    "adaptive_token_budget": False,
    "future_memory_check": False,
    "pace_admission": False,
    "demote_late": False,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Step times of the textbook GPU, see the module's docstring; seconds and bytes."""

    # dense bfloat16: 989 TFLOP/s, of which about 60 % are reached
    flops: float = 0.6 * 989e12
    # 3.35 TB/s, of which about 80 % are reached
    bandwidth: float = 0.8 * 3.35e12
    # launches and bookkeeping of a step
    host: float = 1e-3
    weight_bytes: float = 2.0 * _PARAMETERS
    # added to a step with both chunks of prompts and single tokens, if kernels for mixed batches
    # are slower
    mixed: float = 0.0

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = 0.0
        wide = narrow = 0
        for _, start, num_tokens, _, _ in plan.rows:
            # a chunk reads the keys before it once, and its own half on average
            keys += start + num_tokens / 2
            wide += num_tokens > 1
            narrow += num_tokens == 1
        compute = 2.0 * _PARAMETERS * plan.num_tokens / self.flops
        weights = self.weight_bytes / self.bandwidth
        extra = self.mixed if wide and narrow else 0.0
        return self.host + max(compute, weights) + keys * KV_BYTES / self.bandwidth + extra


GPU = Machine()


def replica(
    times: StepTimes = GPU,
    *,
    num_blocks: int = 20_000,
    block_size: int = BLOCK_SIZE,
    prefix_caching: bool = False,
    watermark: float = 0.01,
    **scheduler: Any,
) -> ReplicaSpec:
    """Return one engine, ``PLAIN`` by default; ``scheduler`` are fields of ``SchedulerConfig``.
    20,000 blocks of 16 tokens are 42 GB: a comfortable pool on 80 GB."""
    defaults: dict[str, Any] = {"max_model_len": 16_384, "max_num_batched_tokens": 2048}
    config = SchedulerConfig(**(PLAIN | defaults | scheduler))
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=prefix_caching,
        watermark=watermark,
    )
    return ReplicaSpec(ReplicaConfig(scheduler=config, cache=cache), times)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one simulation."""

    metrics: Metrics
    totals: Totals
    steps: StepWatcher


def serve(
    workload: Iterable[Arrival],
    pool: Pool | ReplicaSpec,
    watch: Callable[[int, SchedulerOutput, float, float, float], None] | None = None,
    *,
    gaps: bool = False,
) -> Run:
    """Simulate; ``gaps`` also measures every gap between two tokens, which takes longer.

    ``watch`` sees every plan.
    """
    if isinstance(pool, ReplicaSpec):
        pool = Pool((pool,), LeastOutstanding())
    metrics = Metrics()
    steps = StepWatcher(metrics if gaps else None)

    def on_plan(index: int, plan: SchedulerOutput, made: float, start: float, end: float) -> None:
        steps(index, plan, made, start, end)
        if watch is not None:
            watch(index, plan, made, start, end)

    totals = Simulator(pool, metrics.add, on_plan=on_plan).run(workload)
    return Run(metrics, totals, steps)


@dataclass(frozen=True, slots=True)
class Study:
    """A page of docs/studies and the functions that fill it."""

    # the page's name
    name: str
    # Markdown by table name
    tables: Callable[[], dict[str, str]]
    # writes pictures into a folder, if the study has any
    plots: Callable[[Path], None] | None = None
