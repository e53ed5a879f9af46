"""Arrival order with a head start for small work: gamma-Boost."""

from __future__ import annotations

import math
from collections import deque

from paceline.core.policies.base import PolicyContext
from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.request import Request

__all__ = ["BoostPolicy", "boost", "solve_gamma"]

_WINDOW = 256
_REFIT = 32
_MOST_SECONDS = 30.0


def boost(gamma: float, seconds: float) -> float:
    """Head start of a job of known size: (1/g) ln(m / (m - 1)), m = exp(g S) (arXiv 2404.08826)."""
    exponent = gamma * seconds
    if exponent > 30.0:
        return 0.0
    m = math.exp(exponent)
    return _MOST_SECONDS if m <= 1.0 else min(_MOST_SECONDS, math.log(m / (m - 1.0)) / gamma)


def solve_gamma(rate: float, sizes: list[float]) -> float:
    """The decay rate g > 0 with g = rate * (E[exp(g S)] - 1), or 0 when the load is too high for
    one to exist (FCFS is then the best there is) or too low to matter."""
    mean = sum(sizes) / len(sizes)
    if rate * mean >= 1.0 or mean <= 0.0:
        return 0.0

    def excess(g: float) -> float:
        return rate * (sum(math.exp(min(g * s, 60.0)) for s in sizes) / len(sizes) - 1.0) - g

    low, high = 0.0, 1.0 / mean
    while excess(high) < 0.0 and high < 1e6:
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2.0
        if excess(middle) < 0.0:
            low = middle
        else:
            high = middle
    return low


class BoostPolicy(FcfsPolicy):
    """Arrival minus boost; small requests get a large one, large requests none.

    Wins: the tail. It improves on FCFS there where shortest-first makes it worse. Loses: mean
    latency against shortest-first; at overload no boost exists and it is FCFS.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        self._gamma = 0.0

    def key(self, request: Request) -> float:
        seconds = self._context.work.seconds(request)
        self._seen.append((request.asked.arrival_time, seconds))
        self._num_seen += 1
        if self._num_seen % _REFIT == 0:
            span = max(t for t, _ in self._seen) - min(t for t, _ in self._seen)
            sizes = [s for _, s in self._seen]
            self._gamma = solve_gamma((len(sizes) - 1) / span, sizes) if span > 0.0 else 0.0
        if self._gamma <= 0.0:
            return self._arrival(request)
        most = _MOST_SECONDS if request.targets.ttft is None else 0.5 * request.targets.ttft
        return self._arrival(request) - min(most, boost(self._gamma, seconds))
