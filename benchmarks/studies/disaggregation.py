"""Disaggregation against colocation: four GPUs, divided or not.

The figure is the highest rate at which 90 % of requests meet both targets (DistServe's goodput,
OSDI'24), found by bisection over simulations. Colocated replicas do everything: *fixed* with the
textbooks' scheduler, *paced* with Paceline's defaults to meet targets. Divided ones hand each
request's keys and values over after the first token. The GPUs are small ones (24 GB, 300 GB/s,
121 TFLOP/s: an L4's data sheet, of which the same shares are reached): the same balance at a tenth
of the simulated tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.studies.common import BLOCK_SIZE, KV_BYTES, PLAIN, Machine, Study, replica, serve
from paceline.routing.routers import LeastOutstanding
from paceline.sim.plan.search import Target, highest_rate
from paceline.sim.plan.split import estimate_split
from paceline.sim.pool import Disaggregation, Pool
from paceline.sim.report.metrics import Summary
from paceline.sim.report.plots import plot_curves
from paceline.sim.report.table import text_table
from paceline.sim.transfer import KVTransfer
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

GPUS = 4
SMALL = Machine(flops=0.6 * 121e12, bandwidth=0.8 * 300e9)
# 24 GB x 0.9 less 16 GB of weights hold 42,000 tokens
BLOCKS = 2600
TTFT, TPOT = 2.0, 0.120
SECONDS = 100
# mean prompt and output
WORKLOADS = {
    "summaries": (3000, 60),
    "chat": (800, 200),
    "writing": (150, 400),
}
# bytes/s: 100, 10 and 1 Gbit/s
FAST, NETWORK, SLOW = 12.5e9, 1.25e9, 0.125e9
TARGET = Target(0.9)


def _pool(way: str, bandwidth: float) -> Pool:
    if way in ("together, fixed", "together, paced"):
        settings: dict[str, Any] = dict.fromkeys(PLAIN, way == "together, paced")
        spec = replica(SMALL, num_blocks=BLOCKS, **settings)
        return Pool((spec,) * GPUS, LeastOutstanding())
    prefill = int(way.split(":")[0])
    decode = replica(SMALL, num_blocks=BLOCKS, prefix_caching=True)
    split = Disaggregation(
        (decode,) * (GPUS - prefill), KVTransfer(KV_BYTES, bandwidth, 1e-3), LeastOutstanding()
    )
    return Pool((replica(SMALL, num_blocks=BLOCKS),) * prefill, LeastOutstanding(), split)


@cache
def _run(workload: str, way: str, rate: float, bandwidth: float) -> Summary:
    prompt, output = WORKLOADS[workload]
    # sigma 0.5: the median is the mean divided by exp(0.125)
    spec = (
        f"synthetic:rate={rate!r},prompt=lognormal({prompt / 1.133},0.5),"
        f"output=lognormal({output / 1.133},0.5),seconds={SECONDS},"
        f"classes=both(1,ttft={TTFT},tpot={TPOT})"
    )
    return serve(open_workload(spec, seed=3), _pool(way, bandwidth)).metrics.summary(way)


def _goodput(workload: str, way: str, bandwidth: float = NETWORK) -> str:
    found = highest_rate(
        lambda rate: _run(workload, way, rate, bandwidth),
        TARGET,
        low=0.125,
        high=16,
        precision=0.06,
    )
    return "never" if found.size is None else f"{found.size:.2f}"


WAYS = ("together, fixed", "together, paced", "1:3", "2:2", "3:1")


def tables() -> dict[str, str]:
    """Return tables of requests per second, and of the best split by arithmetic."""
    rows = [["requests/s", *WAYS, "arithmetic", "arithmetic, together"]]
    for workload, (prompt, output) in WORKLOADS.items():
        estimate = estimate_split(
            SMALL,
            prompt_tokens=prompt,
            output_tokens=output,
            tpot=TPOT,
            max_batch=BLOCKS * BLOCK_SIZE // (prompt + output // 2),
            max_num_batched_tokens=2048,
            replicas=GPUS,
        )
        best = f"{estimate.best[0]}:{estimate.best[1]} {estimate.split_rate:.2f}"
        cells = [_goodput(workload, way) for way in WAYS]
        rows.append([workload, *cells, best, f"{estimate.colocated_rate:.2f}"])
    links = [["requests/s of 2:2", "100 Gbit/s", "10 Gbit/s", "1 Gbit/s"]]
    for workload in WORKLOADS:
        cells = [_goodput(workload, "2:2", link) for link in (FAST, NETWORK, SLOW)]
        links.append([workload, *cells])
    return {"goodput": text_table(rows), "links": text_table(links)}


def plots(folder: Path) -> None:
    """Plot attained requests per second against offered ones, for chat."""
    rates = (2.0, 4.0, 6.0, 8.0, 10.0)
    curves = {
        way: [(rate, _run("chat", way, rate, NETWORK).attainment * rate) for rate in rates]
        for way in WAYS
    }
    plot_curves(
        curves, folder / "disaggregation.png", x="requests/s", y="requests/s within both targets"
    )


STUDY = Study("disaggregation", tables, plots)
