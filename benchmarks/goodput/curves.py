"""Curves of rate against share within targets: which rates to ask, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["ATTAINMENT", "Curve", "Search", "capacity", "falling", "overload", "summary"]

ATTAINMENT = 0.9
# by rate, what ``figures`` says of it
Curve = dict[float, dict[str, Any]]
# of capacity; the last rate asked
BEYOND = 2.0
# of neighbouring rates on either side of capacity: no further apart
_NEAR = 1.25
# of rates until there is one on either side
_STRIDE = 1.5


def falling(curve: Curve) -> list[tuple[float, float]]:
    """(rate, share within) with shares that never rise: the nearest such to those measured, by
    requests (pool adjacent violators)."""
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
    """Highest rate with ATTAINMENT within; between the last that has it and the next."""
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
    """(goodput beyond the rate of most goodput, as a share of that: the least; the highest rate
    asked, in capacities). None without a capacity.

    1.0: it never falls, up to that rate. Rates below the one of most goodput say nothing: no more
    can be served well than comes.
    """
    most = capacity(curve)
    if not most:
        return None
    best = max(curve, key=lambda rate: curve[rate]["goodput_rps"])
    peak = curve[best]["goodput_rps"]
    least = min(run["goodput_rps"] for rate, run in curve.items() if rate >= best)
    return round(least / peak, 3), round(max(curve) / most, 2)


class Search:
    """Which rates to ask of one engine: up or down until its capacity lies between two near ones,
    then BEYOND times that.

    Args:
        start: the first.
        least: below this its capacity is not looked for.
        most: rates to find it with, at most; twice as many while all of these were beyond it.
        beyond: whether to ask BEYOND times the capacity too.
    """

    def __init__(self, start: float, *, least: float, most: int, beyond: bool) -> None:
        self.curve: Curve = {}
        self._start = start
        self._least = least
        self._most = most
        self._beyond = beyond

    def next(self) -> float | None:
        """The next rate; None: it is done. ``curve`` must have it before the next call."""
        rate = self._next()
        return None if rate is None else round(rate, 3)

    def _next(self) -> float | None:
        if not self.curve:
            return self._start
        shares = falling(self.curve)
        within = [rate for rate, share in shares if share >= ATTAINMENT]
        short = [rate for rate, share in shares if share < ATTAINMENT]
        if not within:
            lower = min(short) / _STRIDE
            return lower if len(self.curve) < 2 * self._most and lower >= self._least else None
        if len(self.curve) < self._most:
            if not short:
                return max(within) * _STRIDE
            elif min(short) > _NEAR * max(within):
                return math.sqrt(min(short) * max(within))
        last = BEYOND * capacity(self.curve)
        # up to what is lost by rounding; once, even if it turns out to be within
        if not self._beyond or max(self.curve) >= 0.99 * last:
            return None
        self._beyond = False
        return last


def summary(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, Any]:
    """Of curves by engine and kind of arrivals: what each holds, and what is left beyond it.

    The least of all kinds of arrivals counts. An engine that did not run has None, and so has one
    without a capacity under some kind for what is left of it.
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
    for name in ("paceline", "fcfs-best-fixed"):
        found = list(beyond.get(name, {}).values())
        shares = [each[0] for each in found if each is not None]
        left[name] = min(shares) if found and len(shares) == len(found) else None
    return {
        "capacity_rps": {
            name: min(held.get(name, {}).values(), default=None)
            for name in ("paceline", "fcfs-best-fixed", "vllm-cpu")
        },
        "capacity_by_arrivals": held,
        "overload_goodput_fraction": left,
        "overload_by_arrivals": beyond,
    }
