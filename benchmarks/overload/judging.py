"""What runs come to: shares by the minute, forecasts beside what came, best effort's share."""

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
    """Requests that came in it, and those of them that were served in time."""

    came: int
    kept: int


def by_minute(
    moments: Iterable[tuple[float, bool]], count: int, begin: float = 0.0
) -> list[Minute]:
    """Of (when it came, whether it was served in time), the minutes from ``begin`` on."""
    came, kept = [0] * count, [0] * count
    for at, ok in moments:
        index = int((at - begin) // MINUTE)
        if 0 <= index < count:
            came[index] += 1
            kept[index] += ok
    return [Minute(*each) for each in zip(came, kept, strict=True)]


def of_possible(minutes: Sequence[Minute], capacity: float) -> list[float]:
    """Served in time, of what that minute's own arrivals allow: all, or what there is room for at
    ``capacity`` requests a second. Minutes in which none came are left out."""
    return [each.kept / min(each.came, capacity * MINUTE) for each in minutes if each.came]


def ideal(moments: Sequence[float], places: int, service: float, patience: float) -> list[bool]:
    """Which of equal requests have a place in time if each takes the first one that comes free, in
    order of arrival, and those that would be too late take none: no order serves more of them.

    Args:
        moments: in order.
        service: seconds for which a request holds a place.
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
    """Forecasts of first tokens over what came: the median, and by what factor at most nine in ten
    were off, either way. None of no requests."""

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
    """The forecast over what came, of requests of a kind that were served."""
    return [
        max(1e-9, each.predicted_ttft) / each.ttft
        for each in outcomes
        if each is not None and each.predicted_ttft is not None and each.ttft and kind(each)
    ]


class Shares:
    """Which share of the work was best effort's, in every window of so many seconds; sees every
    plan. The seconds of a step are divided among its rows by what each takes.

    Args:
        arrivals: in order, as they are served.
        seconds_of: of a row of so many tokens.
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
        # seconds of best effort, and all, by window
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
        """The least share of a window within these seconds."""
        first, last = round(begin / self._window), round(end / self._window)
        return min(own / whole for own, whole in self._spent[first:last] if whole)
