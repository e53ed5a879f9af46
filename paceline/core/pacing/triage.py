"""Choice of the requests that will be late, made while the others can still be on time.

When more requests wait than can all be on time, serving them in order makes nearly all late: each
is started just when it cannot be on time any more. Moore and Hodgson's rule (1968) instead keeps
the most requests on time: go through them in order, add up their work, and whenever one would be
late, leave out the largest so far. If groups must not pay for one another, leave out the largest of
the late request's own group.

This module does not know the queue, memory or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from operator import gt

from paceline.core.request import Request

__all__ = ["all_in_time", "triage"]


def all_in_time(now: float, seconds: Iterable[float], due: Iterable[float]) -> bool:
    """Whether jobs done one after the other from ``now`` on are all done when they are due."""
    ends = islice(accumulate(seconds, initial=now), 1, None)
    return not any(map(gt, ends, due))


def triage(
    waiting: Sequence[Request],
    now: float,
    seconds: Sequence[float],
    due: Sequence[float],
    group: Callable[[Request], str] = lambda _: "",
) -> list[Request]:
    """Return the requests to leave out so that the others are done in time.

    Args:
        waiting: requests in the order in which they are to be judged.
        now: when the first of them can be started.
        seconds: work of each until it is done.
        due: time at which each must be done.
        group: requests are left out only for others of their group.
    """
    # this is nearly always so, and takes far less time to find out
    if all_in_time(now, seconds, due):
        return []
    left_out: list[Request] = []
    # by group, a heap of the requests kept: (-work, order of service, request), the largest first
    groups: dict[str, list[tuple[float, int, Request]]] = {}
    end = now
    for number, (request, work, latest) in enumerate(zip(waiting, seconds, due, strict=True)):
        kept = groups.setdefault(group(request), [])
        if end + work <= latest:
            end += work
            heapq.heappush(kept, (-work, number, request))
            continue
        largest = -kept[0][0] if kept else 0.0
        if largest > work and end + work - largest <= latest:
            loser = heapq.heapreplace(kept, (-work, number, request))[2]
            end += work - largest
            left_out.append(loser)
        else:
            # this one is the largest, or late in any case
            left_out.append(request)
    return left_out
