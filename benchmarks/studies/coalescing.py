"""Phase-aligned coalescing against chunked prefill.

Coalescing holds arrivals up to a window and computes their prompts together, in steps of their own;
chunked prefill computes single tokens together with every chunk. One GPU, the same requests, two
loads; and once more on a GPU whose steps of mixed kinds take 15 ms longer.
"""

from __future__ import annotations

from typing import Any

from benchmarks.studies.common import GPU, Machine, Study, replica, serve
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

WORKLOAD = "synthetic:rate={},prompt=lognormal(1200,0.6),output=lognormal(120,0.5),n=500"
RATES = (4, 10)
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 512": {"max_num_batched_tokens": 512},
    "chunks of 2048": {"max_num_batched_tokens": 2048},
    "phases, no window": {"policy": "phase-aligned", "coalesce_window_s": 0.0},
    "phases, 50 ms": {"policy": "phase-aligned", "coalesce_window_s": 0.05},
    "phases, 500 ms": {"policy": "phase-aligned", "coalesce_window_s": 0.5},
}


def _rows(machine: Machine, rate: int) -> list[list[str]]:
    rows = [["", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "ITL max", "TPOT mean", "E2E p99"]]
    for name, settings in WAYS.items():
        spec = replica(machine, **settings)
        run = serve(open_workload(WORKLOAD.format(rate), seed=2), spec, gaps=True)
        summary = run.metrics.summary(name)
        ttft, tpot, itl, e2e = summary.ttft, summary.tpot, summary.itl, summary.e2e
        assert ttft is not None and tpot is not None and itl is not None and e2e is not None
        values = (ttft.p50, ttft.p99, itl.p50, itl.p99, itl.max, tpot.mean, e2e.p99)
        rows.append([name, *(f"{1e3 * value:.0f}" for value in values)])
    return rows


def tables() -> dict[str, str]:
    """Return tables of milliseconds at each load, and where mixed steps are slow."""
    found = {f"rate-{rate}": text_table(_rows(GPU, rate)) for rate in RATES}
    slow = Machine(mixed=0.015)
    return found | {"slow-mixed": text_table(_rows(slow, RATES[-1]))}


STUDY = Study("coalescing", tables)
