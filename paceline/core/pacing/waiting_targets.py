"""Waiting requests that have targets to meet: when they are due, and the fewest to leave out.

When more requests wait than can all be on time, serving them in order makes nearly all late: each
is started just when it cannot be on time any more. Moore and Hodgson's rule (1968) instead keeps
the most requests on time: go through them in order, add up their work, and whenever one would be
late, leave out the largest so far, of its own group if groups must not pay for one another.

This module does not know what becomes of the requests that are left out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter, gt
from typing import Any, Final

from paceline.core.request import ORDER, Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = [
    "MAX_TRIAGED", "DueEntry", "WaitingTargets", "all_in_time", "due_entry", "first_token_due",
    "is_deadline_batch", "triage",
]  # fmt: skip

# most waiting requests in one triage, as the work of that many takes longer than targets last
MAX_TRIAGED: Final = 256

# (deadline, number of arrival, request); sorts by deadline
DueEntry = tuple[float, int, Request]


def _is_targeted(request: Request) -> bool:
    # for an ordinary request; none of this changes while a request waits
    return request.targets.ttft is not None and request.first_scheduled_time is None


def first_token_due(request: Request) -> float:
    """Return the time after which the first token is late."""
    return request.asked.arrival_time + request.late_after


def _ahead(request: Request) -> float:
    """Return the seconds from its own TTFT target to the time at which it counts as late."""
    return request.late_after - (request.targets.ttft or 0.0)


def _standing(request: Request) -> float:
    """Return its key in the order if its TTFT target were the time at which it counts as late."""
    return request.order[0] + _ahead(request)


def is_deadline_batch(request: Request) -> bool:
    """Whether the request is best effort with a deadline that can still be met."""
    return request.targets.deadline is not None and request.tier is Tier.DEADLINE_BATCH


def due_entry(request: Request) -> DueEntry:
    """Return the entry of a best-effort request; no two are equal, so no requests are compared."""
    due = request.asked.arrival_time + (request.targets.deadline or 0.0)
    return due, request.order[1], request


def _change(members: list[Any], member: Any, more: int, key: Any = None) -> None:
    """Put a member into a sorted list (``more`` > 0), or take it out."""
    if more > 0:
        insort(members, member, key=key)
    else:
        del members[bisect_left(members, member if key is None else key(member), key=key)]


class WaitingTargets:
    """Indices of the waiting queues, which report members that come and go; public, read-only."""

    def __init__(self, state: SchedulerState) -> None:
        self._queues = state.waiting
        # all requests are one group unless tenants are kept apart
        apart = state.policy.keeps_tenants_apart
        self.group = attrgetter("asked.tenant") if apart else lambda _: ""
        # ordinary requests with a TTFT target that were never started, by nonempty group, in order
        self.targeted: dict[str, list[Request]] = {}
        # when their first tokens are due, sorted
        self.dues: list[float] = []
        # number of times that one of these came or went
        self.num_changes = 0
        # best-effort requests with a deadline that can still be met, sorted
        self.deadline_batch: list[DueEntry] = []
        self._queues.on_change = self._count

    def _count(self, request: Request, more: int) -> None:
        """Update the indices for a request that comes (1) or goes (-1)."""
        if request.tier is Tier.ORDINARY:
            if _is_targeted(request):
                self.num_changes += 1
                group = self.group(request)
                own = self.targeted.setdefault(group, [])
                _change(own, request, more, ORDER)
                if not own:
                    del self.targeted[group]
                _change(self.dues, first_token_due(request), more)
        elif is_deadline_batch(request):
            _change(self.deadline_batch, due_entry(request), more)

    def in_time(self, starts: float, tokens: int, seconds_per_token: float) -> bool:
        """Whether no first token will be late in any order, if the prompts of all and ``tokens``
        more are computed from ``starts`` on."""
        tokens += self._queues.num_tokens[Tier.ORDINARY]
        return not self.dues or starts + tokens * seconds_per_token <= self.dues[0]

    def left_out(
        self, first: list[Request], starts: float, seconds_per_token: float
    ) -> list[Request]:
        """Return which requests are left out so that the others are on time, of waiting ones in the
        order of service whose prompts are computed from ``starts`` on."""
        # a target tighter than the default makes a request run sooner, not be left out sooner
        judged = sorted(first, key=_standing) if any(map(_ahead, first)) else first
        return triage(
            judged,
            starts,
            # the prompt of a fork is computed already
            [request.num_lacking_tokens * seconds_per_token for request in judged],
            list(map(first_token_due, judged)),
            self.group,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the indices agree with the queues."""
        deadline_batch = filter(is_deadline_batch, self._queues)
        assert self.deadline_batch == sorted(map(due_entry, deadline_batch))
        targeted: dict[str, list[Request]] = {}
        for request in sorted(filter(_is_targeted, self._queues.ordinary), key=ORDER):
            targeted.setdefault(self.group(request), []).append(request)
        assert self.targeted == targeted
        assert self.dues == sorted(map(first_token_due, chain(*targeted.values())))


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
