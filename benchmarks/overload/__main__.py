"""``make bench-overload``: see the package."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.overload import rates
from paceline.bench.machine import machine

QUICK = bool(os.environ.get("QUICK"))


def _chosen(name: str, default: str) -> list[str]:
    return [part for part in os.environ.get(name, default).split(",") if part]


POLICIES = _chosen("POLICIES", "deadline,priority,fair,fcfs,fcfs-bounded,sjf,phase-aligned")
LOADS = [float(each) for each in _chosen("LOADS", "1.2,2" if QUICK else "0.9,1.1,1.2,1.5,2,3")]
SEEDS = range(1, 1 + int(os.environ.get("SEEDS", "1" if QUICK else "5")))
MINUTES = int(os.environ.get("MINUTES", "4" if QUICK else "10"))


def main() -> int:
    began = time.perf_counter()
    jobs = [
        rates.Rate(policy, load, seed, MINUTES, beside)
        for policy in POLICIES
        for load in LOADS
        for beside in ((False, True) if policy in rates.BESIDE else (False,))
        for seed in SEEDS
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = dict(zip(jobs, pool.map(rates.rate, jobs), strict=True))
    print(rates.tables(found), flush=True)
    results = {"policies": rates.figures(found), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps({"bench": "overload", "machine": machine(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
