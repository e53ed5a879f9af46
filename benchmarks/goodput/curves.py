"""Curves of the share within targets by rate: which rates to measure, and their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ATTAINMENT",
    "Curve",
    "Search",
    "capacity",
    "falling",
    "overload",
    "summary",
    "together",
]

ATTAINMENT = 0.9
# figures of a rate's runs (``together``), by rate
Curve = dict[float, dict[str, Any]]
# the last rate measured, as a multiple of capacity
BEYOND = 2.0
# largest ratio of the two neighbouring rates around capacity
_NEAR = 1.25
# ratio of successive rates until there is one on either side
_STRIDE = 1.5


def falling(curve: Curve) -> list[tuple[float, float]]:
    """Return (rate, share within) with shares that never rise: the closest fit to the measured
    ones, weighted by requests (pool adjacent violators)."""
    # requests within, requests, rates
    pools: list[tuple[float, int, list[float]]] = []
    for rate, run in sorted(curve.items()):
        within, count, rates = run["attainment"] * run["requests"], run["requests"], [rate]
        while pools and pools[-1][0] / pools[-1][1] < within / count:
            before = pools.pop()
            within, count, rates = within + before[0], count + before[1], before[2] + rates
        pools.append((within, count, rates))
    return [(rate, within / count) for within, count, rates in pools for rate in rates]


def capacity(curve: Curve) -> float:
    """Return the highest rate with ATTAINMENT within, interpolated to the next rate."""
    best = 0.0
    before: tuple[float, float] | None = None
    for rate, share in falling(curve):
        if share >= ATTAINMENT:
            best, before = rate, (rate, share)
        else:
            if before is not None:
                low, kept = before
                best = low + (rate - low) * (kept - ATTAINMENT) / (kept - share)
            break
    return best


def overload(curve: Curve) -> tuple[float, float] | None:
    """Return (the least goodput beyond the rate of most goodput, as a share of that; the highest
    rate measured, in capacities). None without a capacity.

    1.0: it never falls, up to that rate. Rates below the one of most goodput do not count, as their
    goodput is limited by the arrivals.
    """
    most = capacity(curve)
    if not most:
        return None
    best = max(curve, key=lambda rate: curve[rate]["goodput_rps"])
    peak = curve[best]["goodput_rps"]
    least = min(run["goodput_rps"] for rate, run in curve.items() if rate >= best)
    return round(least / peak, 3), round(max(curve) / most, 2)


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one rate's runs: over all their requests, and their mean goodput."""
    count = sum(run["requests"] for run in runs)
    kept = sum(run["attainment"] * run["requests"] for run in runs)
    return {
        "requests": count,
        "attainment": round(kept / count, 4),
        "goodput_rps": round(sum(run["goodput_rps"] for run in runs) / len(runs), 3),
        "runs": list(runs),
    }


class Search:
    """Rates to measure for one engine: up or down until its capacity lies between two near ones,
    then BEYOND times that. The goodput beyond capacity compares runs that are many minutes apart,
    and a machine's speed changes meanwhile: so the lowest rate that ever had most goodput and those
    above it are measured ``again`` more times, one after another.

    Args:
        start: the first rate.
        least: capacities below this rate are not looked for.
        most: most rates to find it with; twice as many while all of these were beyond it.
        beyond: whether to measure BEYOND times the capacity too.
        again: number of repetitions after that.
    """

    def __init__(
        self, start: float, *, least: float, most: int, beyond: bool, again: int = 0
    ) -> None:
        self._runs: dict[float, list[dict[str, Any]]] = {}
        # the lowest rate that ever had most goodput
        self._best = math.inf
        self._again = again
        self._start = start
        self._least = least
        self._most = most
        self._beyond = beyond

    @property
    def curve(self) -> Curve:
        """Figures so far, by rate."""
        return {rate: together(runs) for rate, runs in self._runs.items()}

    def add(self, rate: float, run: dict[str, Any]) -> None:
        """Add the figures of a run at the rate that ``next`` returned."""
        self._runs.setdefault(rate, []).append(run)

    def next(self) -> float | None:
        """Return the next rate, None when the search is done. Call ``add`` before the next call."""
        # repeated runs may leave no rate within, and then lower ones are looked for
        rate = self._next()
        return self._next_again() if rate is None else round(rate, 3)

    def _next(self) -> float | None:
        curve = self.curve
        if not curve:
            return self._start
        shares = falling(curve)
        within = [rate for rate, share in shares if share >= ATTAINMENT]
        short = [rate for rate, share in shares if share < ATTAINMENT]
        if not within:
            lower = min(short) / _STRIDE
            return lower if len(curve) < 2 * self._most and lower >= self._least else None
        if len(curve) < self._most:
            if not short:
                return max(within) * _STRIDE
            elif min(short) > _NEAR * max(within):
                return math.sqrt(min(short) * max(within))
        last = BEYOND * capacity(curve)
        # 0.99, as rates are rounded; once, even if that rate turns out to be within
        if not self._beyond or max(curve) >= 0.99 * last:
            return None
        self._beyond = False
        return last

    def _next_again(self) -> float | None:
        """Return the lowest of the least often measured rates from the best one on. The best one's
        mean may become less than a lower one's single run, which is then among them too."""
        curve = self.curve
        if not capacity(curve):
            # without a capacity there is no goodput to compare with
            return None
        best = max(curve, key=lambda rate: curve[rate]["goodput_rps"])
        self._best = min(self._best, best)
        behind = [
            rate
            for rate in sorted(curve)
            if rate >= self._best and len(self._runs[rate]) <= self._again
        ]
        return min(behind, key=lambda rate: len(self._runs[rate]), default=None)


def summary(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, Any]:
    """Return each engine's capacity, and its goodput beyond it, from curves by engine and kind.

    The least of all kinds of arrivals counts. An engine that did not run has None; one without a
    capacity under some kind has None for the goodput beyond it.
    """
    held = {
        name: {kind: round(capacity(curve), 3) for kind, curve in kinds.items()}
        for name, kinds in curves.items()
    }
    beyond = {
        name: {kind: overload(curve) for kind, curve in kinds.items()}
        for name, kinds in curves.items()
    }
    left: dict[str, float | None] = {}
    for name in ("paceline", "deadline-best-fixed", "fcfs-best-fixed"):
        found = list(beyond.get(name, {}).values())
        shares = [each[0] for each in found if each is not None]
        left[name] = min(shares) if found and len(shares) == len(found) else None
    return {
        "capacity_rps": {
            name: min(held.get(name, {}).values(), default=None)
            for name in ("paceline", "deadline-best-fixed", "fcfs-best-fixed", "vllm-cpu")
        },
        "capacity_by_arrivals": held,
        "overload_goodput_fraction": left,
        "overload_by_arrivals": beyond,
    }
