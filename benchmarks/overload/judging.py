"""Figures of runs: shares by the minute, forecasts against outcomes, best effort's share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.common.statistics import percentile
from paceline.core.outputs import SchedulerOutput
from paceline.sim.arrival import Arrival, Served

__all__ = [
    "MINUTE",
    "Minute",
    "Ratios",
    "Shares",
    "by_minute",
    "ideal",
    "of_possible",
    "ratios",
]

MINUTE = 60.0


class Minute(NamedTuple):
    """Number of requests that arrived in a minute, and of those that were served in time."""

    came: int
    kept: int


def by_minute(
    moments: Iterable[tuple[float, bool]], count: int, begin: float = 0.0
) -> list[Minute]:
    """Count requests, (arrival, whether it was served in time), by minutes from ``begin`` on."""
    came, kept = [0] * count, [0] * count
    for at, ok in moments:
        index = int((at - begin) // MINUTE)
        if 0 <= index < count:
            came[index] += 1
            kept[index] += ok
    return [Minute(*each) for each in zip(came, kept, strict=True)]


def of_possible(minutes: Sequence[Minute], capacity: float) -> list[float]:
    """Return each minute's share served in time of the possible: its own arrivals, or at most
    ``capacity`` requests a second. Minutes without arrivals are left out."""
    return [each.kept / min(each.came, capacity * MINUTE) for each in minutes if each.came]


def ideal(moments: Sequence[float], places: int, service: float, patience: float) -> list[bool]:
    """Return which of equal requests get a slot in time if each takes the first free one, in order
    of arrival, and requests that would be late take none: no order serves more of them.

    Args:
        moments: times of arrival, in order.
        service: seconds for which a request holds a slot.
        patience: seconds for which it may wait.
    """
    free = [0.0] * places
    kept = []
    for at in moments:
        start = max(at, free[0])
        kept.append(start - at <= patience)
        if kept[-1]:
            heapq.heapreplace(free, start + service)
    return kept


class Ratios(NamedTuple):
    """Predicted over actual times to first token: the median, and the factor by which at most nine
    in ten were off, either way. None: there were no requests."""

    p50: float | None
    p90: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratios:
        if not values:
            return cls(None, None, 0)
        off = percentile([max(each, 1.0 / each) for each in values], 0.9)
        return cls(round(median(values), 3), round(off, 3), len(values))


def ratios(outcomes: Iterable[Served | None], kind: Callable[[Served], bool]) -> list[float]:
    """Return predicted over actual times to first token, for served requests of a kind."""
    return [
        max(1e-9, each.predicted_ttft) / each.ttft
        for each in outcomes
        if each is not None and each.predicted_ttft is not None and each.ttft and kind(each)
    ]


class Shares:
    """Best effort's share of the work in every window of ``window`` seconds; called with every
    plan. The seconds of a step are divided among its rows by the time that each takes.

    Args:
        arrivals: in order, as they are served.
        seconds_of: seconds of a row by its number of tokens.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        window: float = 10.0,
        seconds_of: Callable[[int], float] = float,
    ) -> None:
        self._best_effort = {
            f"{number}/0"
            for number, arrival in enumerate(arrivals)
            if arrival.slo_class in ("best-effort", "batch")
        }
        self._window, self._seconds_of = window, seconds_of
        # seconds of best effort, and of all work, by window
        self._spent: list[list[float]] = []

    def __call__(
        self, replica: int, plan: SchedulerOutput, made: float, start: float, end: float
    ) -> None:
        index = int(start // self._window)
        while len(self._spent) <= index:
            self._spent.append([0.0, 0.0])
        own = whole = 0.0
        for request_id, _, num_tokens, _, _ in plan.rows:
            seconds = self._seconds_of(num_tokens)
            whole += seconds
            if request_id in self._best_effort:
                own += seconds
        self._spent[index][0] += (end - start) * own / whole
        self._spent[index][1] += end - start

    def least(self, begin: float, end: float) -> float:
        """Return the least share of a window within these seconds."""
        first, last = round(begin / self._window), round(end / self._window)
        return min(own / whole for own, whole in self._spent[first:last] if whole)
