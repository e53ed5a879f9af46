"""The adaptive token budget against fixed budgets, for requests without targets.

Only the budget differs: first come, first served, no look ahead, no triage. Two machines: the
two-core CPU of the ablation (4 ms a step, 0.4 ms a token), and the textbook GPU, where a step of a
token takes as long as one of two hundred. Each at about 70 % of its capacity, and with all
requests there at once.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.studies.ablation import CPU
from benchmarks.studies.common import GPU, Study, replica, serve
from paceline.sim.report.table import text_table
from paceline.sim.step_times.base import StepTimes
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

LENGTHS: Final = "prompt=lognormal(255,0.8),output=lognormal(60,0.8),n=600"
FIXED: Final = (64, 128, 256, 512, 1024, 2048)
WAYS: Final[dict[str, dict[str, Any]]] = {
    **{f"fixed {size}": {"max_num_batched_tokens": size} for size in FIXED},
    "adaptive": {"max_num_batched_tokens": 2048, "adaptive_token_budget": True},
}
# step times, and requests a second; 1e4: practically all at once
CASES: Final[dict[str, tuple[StepTimes, float]]] = {
    "cpu": (CPU, 3.2),
    "cpu-at-once": (CPU, 1e4),
    "gpu": (GPU, 38.0),
    "gpu-at-once": (GPU, 1e4),
}


def _rows(machine: StepTimes, rate: float) -> list[list[str]]:
    rows = [
        ["", "tokens/s", "TTFT p50", "TTFT p99", "ITL p99", "ITL max", "TPOT mean", "E2E mean",
         "E2E p99"],
    ]  # fmt: skip
    for name, settings in WAYS.items():
        spec = replica(machine, max_num_seqs=64, **settings)
        run = serve(open_workload(f"synthetic:rate={rate},{LENGTHS}", seed=4), spec, gaps=True)
        summary = run.metrics.summary(name)
        ttft, tpot, itl, e2e = summary.ttft, summary.tpot, summary.itl, summary.e2e
        assert ttft is not None and tpot is not None and itl is not None and e2e is not None
        values = (ttft.p50, ttft.p99, itl.p99, itl.max, tpot.mean, e2e.mean, e2e.p99)
        rows.append([name, f"{summary.token_rate:.0f}", *(f"{1e3 * v:.0f}" for v in values)])
    return rows


def tables() -> dict[str, str]:
    """Return tables of output tokens a second, and milliseconds."""
    return {name: text_table(_rows(*case)) for name, case in CASES.items()}


STUDY = Study("budget", tables)
