"""Sixty-four adapters by Zipf on one engine: with less memory than they take, and one of them in a
flood.

The two-core CPU of the ablation (4 ms a step, 0.4 ms a token). An adapter takes 10 MiB, which it
loads in 52 ms, and makes a step longer by 0.5 ms and by 0.02 ms a row
(``paceline.sim.adapters.AdapterSettings``). Loads go on next to the steps. The scheduler is as a
server has it, with nothing of it off.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from benchmarks.common.statistics import percentile
from benchmarks.studies.ablation import CPU
from benchmarks.studies.common import Study
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.adapters import AdapterSettings
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.table import text_table
from paceline.sim.simulator import Simulator
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

ONE: Final = AdapterSettings().num_bytes
LENGTHS: Final = "prompt=lognormal(255,0.8),output=lognormal(60,0.8)"
PLACES: Final = (64, 16, 12, 8)
# requests a second for the other adapters, and for the one in a flood
OTHERS, FLOOD = 1.0, 10.0


def engine(places: int, policy: str) -> ReplicaSpec:
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_model_len=16_384, max_num_seqs=16, policy=policy),
        cache=CacheConfig(block_size=16, num_blocks=20_000, enable_prefix_caching=False),
        adapters=AdapterSettings(ONE, places * ONE),
    )
    return ReplicaSpec(config, CPU)


def run(arrivals: Iterable[Arrival], places: int, policy: str) -> tuple[list[Served], int]:
    """Return the requests that were served, and how often an adapter left memory."""
    served: list[Served] = []
    spec = engine(places, policy)
    pool = Pool.single(spec.config, spec.step_times)
    totals = Simulator(pool, served.append).run(arrivals)
    return served, totals.num_evicted_adapters


def memory() -> list[list[str]]:
    rows = [["in memory", "evictions", "TTFT p50", "TTFT p90", "TTFT p99", "max", "TPOT mean"]]
    for places in PLACES:
        workload = open_workload(f"synthetic:rate=3,{LENGTHS},n=400,adapters=64,zipf=1.1", seed=4)
        served, evictions = run(workload, places, "fair")
        first = sorted(each.ttft or 0.0 for each in served)
        gaps = [each.tpot for each in served if each.tpot is not None]
        values = (*(percentile(first, q) for q in (0.5, 0.9, 0.99)), first[-1])
        rows.append(
            [f"{places} of 64", str(evictions), *(f"{1e3 * value:.0f}" for value in values),
             f"{1e3 * sum(gaps) / len(gaps):.0f}"]
        )  # fmt: skip
    return rows


def flood() -> list[list[str]]:
    """Return the first tokens of other adapters' requests, alone and with a flood of one."""
    others = list(
        open_workload(f"synthetic:rate={OTHERS},{LENGTHS},seconds=60,adapters=8,zipf=0", seed=4)
    )
    more = [
        replace(each, adapter="flood")
        for each in open_workload(f"synthetic:rate={FLOOD},{LENGTHS},seconds=60", seed=5)
    ]
    rows = [
        ["policy", "TTFT p50 alone", "with the flood", "TTFT p99 alone", "with the flood",
         "tokens/s with the flood"]
    ]  # fmt: skip
    for policy in ("fcfs", "fair"):
        found = []
        for workload in (others, list(heapq.merge(others, more, key=lambda each: each.at))):
            served, _ = run(workload, 64, policy)
            rate = sum(each.output_tokens for each in served) / max(
                e.last_token or 0 for e in served
            )
            first = [each.ttft for each in served if each.arrival.adapter != "flood"]
            known = sorted(each for each in first if each is not None)
            found.append([percentile(known, 0.5), percentile(known, 0.99)])
        alone, both = found
        values = (alone[0], both[0], alone[1], both[1])
        rows.append([policy, *(f"{1e3 * value:.0f}" for value in values), f"{rate:.0f}"])
    return rows


def tables() -> dict[str, str]:
    """Return tables in milliseconds."""
    return {"memory": text_table(memory()), "flood": text_table(flood())}


STUDY = Study("adapters", tables)
