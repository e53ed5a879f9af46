"""Lasting overload: are targets met for hours, or for a minute?

Method of all parts but the last: ``paceline serve`` by its defaults, in virtual time, with the
simulator, whose decisions are a live server's. Equal requests want their first token within a
second; eight are served at once, each for a second, so the capacity is just under 8/s, of which a
load is a multiple. Arrivals are Poisson where nothing else is said. A minute is judged against the
requests that could be served in it: all its own, or as many as the capacity. An ideal server takes
requests in order of arrival, but none that would be late: no order serves more.

* ``rates``: every policy at constant loads. The worst minute of all seeds; the most requests that
  waited at once; the predicted over the actual time to first token of served requests: the median,
  and the factor within which nine in ten lie, of all and of late ones. For some policies the same
  while best effort waits all the time, and best effort's share of the work in the worst ten
  seconds. ``fcfs-bounded`` is ``fcfs`` that drops requests after a wait of 0.9 s.
* ``changes``: loads that go up and down, bursts, and recovery: the minute that begins half a minute
  after an overload, over the same minute without one before it.
* ``mixes``: classes, priorities, tenants and prompts of 10 to 4,000 tokens, on a machine where
  tokens cost time. One minute is repeated; every minute is compared with the first, and all with
  a bound on any order of service.
* ``returns``: clients that come back after ``Retry-After``, and the share of them that is accepted.
* ``live``: a server over the null backend, under twice its capacity, through HTTP.

Prints tables and, last, one JSON line. QUICK=1: fewer loads, one seed, four minutes, and a live run
of one. PARTS=rates,... POLICIES=deadline,... LOADS=1.2,... SEEDS=number and MINUTES=number choose.
STEP=0.02 makes steps shorter and answers longer: it takes twice as long. OPTIONS='{"field": value}'
changes fields of the scheduler's configuration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

from tqdm import tqdm

from benchmarks.common.parts import chosen
from benchmarks.overload import changes, live, mixes, rates, returns
from paceline.bench.machine import machine

QUICK = bool(os.environ.get("QUICK"))


PARTS = chosen(("rates", "changes", "mixes", "returns", "live"))
_POLICIES: Final = "deadline,priority,fair,fcfs,fcfs-bounded,sjf,phase-aligned"
POLICIES = (os.environ.get("POLICIES") or _POLICIES).split(",")
_LOADS: Final = "1.2,2" if QUICK else "0.9,1.1,1.2,1.5,2,3"
LOADS = [float(each) for each in (os.environ.get("LOADS") or _LOADS).split(",")]
SEEDS = range(1, 1 + int(os.environ.get("SEEDS") or ("1" if QUICK else "5")))
MINUTES = int(os.environ.get("MINUTES") or ("4" if QUICK else "10"))
LIVE_MINUTES = min(MINUTES, 1 if QUICK else 5)
# policies that are run under changing loads and with returning clients too
_BESIDE = [policy for policy in POLICIES if policy in rates.BESIDE]

Job = tuple[Callable[[Any], Any], Any]


def jobs() -> list[Job]:
    """Return all runs in virtual time; each is a function and its argument."""
    found: list[Job] = []
    if "mixes" in PARTS:
        found += [
            (mixes.mixed, mixes.Mixed(name, seed, MINUTES))
            for name, mix in mixes.MIXES.items()
            if mix.policy in POLICIES
            for seed in SEEDS
        ]
    if "rates" in PARTS:
        found += [
            (rates.rate, rates.Rate(policy, load, seed, MINUTES, beside))
            for policy in POLICIES
            for load in LOADS
            for beside in ((False, True) if policy in rates.BESIDE else (False,))
            for seed in SEEDS[: rates.FEWER.get(policy)]
        ]
    if "changes" in PARTS:
        found += [
            (changes.change, changes.Change(name, policy, seed))
            for policy in _BESIDE
            for name in changes.CHANGES
            for seed in SEEDS
        ]
    if "returns" in PARTS:
        found += [
            (returns.returns, returns.Returned(name, policy, seed))
            for policy in _BESIDE
            for name in returns.SITUATIONS
            for seed in SEEDS
        ]
    return found


def main() -> int:
    began = time.perf_counter()
    asked = jobs()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures: list[Future[Any]] = [pool.submit(job[0], job[1]) for job in asked]
        found: dict[Callable[[Any], Any], dict[Any, Any]] = {}
        shown = tqdm(futures, desc="overload", unit=" runs", disable=None, file=sys.stderr)
        for (function, argument), future in zip(asked, shown, strict=True):
            found.setdefault(function, {})[argument] = future.result()
    results = report(found)
    if "live" in PARTS:
        results["live"] = live.live(LIVE_MINUTES)
        print(f"live: {results['live']}\n")
    results["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps({"bench": "overload", "machine": machine(), "results": results}))
    return 0


def report(found: dict[Callable[[Any], Any], dict[Any, Any]]) -> dict[str, Any]:
    """Print tables of the runs, which are given by their function, and return the results."""
    results: dict[str, Any] = {}
    shares: list[float] = []
    if rated := found.get(rates.rate):
        print(f"constant loads\n\n{rates.tables(rated)}\n")
        results["policies"] = rates.figures(rated)
        shares += [each.share for each in rated.values() if each.share is not None]
    if mixed := found.get(mixes.mixed):
        print(f"mixes\n\n{mixes.table(mixed)}\n")
        results["mixes"] = mixes.figures(mixed)
        shares += [share] if (share := mixes.share(mixed)) is not None else []
    if changed := found.get(changes.change):
        recovered = changes.recovery(changed)
        print(f"loads that change\n\n{changes.table(changed)}\n\nrecovered: {recovered}\n")
        results["recovery_ratio"] = min(recovered.values(), default=None)
        results["recovery"] = recovered
        results["changes"] = changes.figures(changed)
    if came_back := found.get(returns.returns):
        print(f"clients that come back\n\n{returns.table(came_back)}\n")
        results["retry_after_kept"] = returns.kept(came_back)
        results["returns"] = returns.figures(came_back)
    if shares:
        results["share_of_best_effort_min"] = round(min(shares), 4)
    sys.stdout.flush()
    return results


if __name__ == "__main__":
    sys.exit(main())
