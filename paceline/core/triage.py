"""Who will be late, found out while there is time to do something about it.

When more requests wait than can all be on time, serving them in order makes nearly all late: each
is started just when it is past saving. Moore and Hodgson's rule (1968) instead keeps the most
requests on time: go through them in order, add up their work, and whenever one would be late, leave
out the largest so far. Those left out become best effort, or less if they are that. Where groups
must not pay for one another, it is the largest of the late one's own group.

This module does not know the queue, memory or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from paceline.core.request import Request

__all__ = ["triage"]


def _first_token_due(request: Request) -> float:
    ttft = request.slo.ttft
    assert ttft is not None, "only requests with a target can miss it"
    return request.arrival_time + ttft


def triage(
    waiting: Iterable[Request],
    now: float,
    seconds: Callable[[Request], float],
    group: Callable[[Request], str] = lambda _: "",
    due: Callable[[Request], float] = _first_token_due,
) -> list[Request]:
    """Requests to leave out so that the others are done in time.

    Args:
        waiting: requests in the order in which they will be served.
        now: when the first of them can be started.
        seconds: work until a request is done: has its first token, where nothing else is said.
        group: those of one are left out for one another.
        due: when it must be done.
    """
    left_out: list[Request] = []
    # of each group (-work, order of service, request): the largest first
    groups: dict[str, list[tuple[float, int, Request]]] = {}
    end = now
    for number, request in enumerate(waiting):
        work = seconds(request)
        kept = groups.setdefault(group(request), [])
        latest = due(request)
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
            # it is the largest, or late whoever else is left out
            left_out.append(request)
    return left_out
