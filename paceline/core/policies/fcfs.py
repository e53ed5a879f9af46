"""First come, first served."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from paceline.core.policies.base import PolicyContext, SchedulingPolicy
from paceline.core.queues.request_queue import RequestQueue, WaitingQueue
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.core.tier import Tier

__all__ = ["FcfsPolicy", "overrides"]

_ORDER = attrgetter("order")


class FcfsPolicy:
    """First come, first served. The base class of the other policies.

    Wins: predictable, nothing starves. Loses: short requests wait behind long ones.
    """

    mixes = True
    keeps_tenants_apart = False
    bounds_gaps = False
    key_per_second = 1.0

    def __init__(self, context: PolicyContext) -> None:
        self._context = context

    def make_queue(self) -> WaitingQueue:
        return RequestQueue()

    def assumed(self, request: Request) -> Slo:
        return request.asked.slo

    def key(self, request: Request) -> float:
        return request.asked.arrival_time

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterable[Request]:
        return heapq.merge(*waiting.values(), key=_ORDER)

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        return [r for r in candidates if r.best_effort and not r.granted] or candidates

    def displaces(self, waiting: Request, running: Request) -> bool:
        ordinary = Tier.ORDINARY
        if running.tier is ordinary or waiting.tier is not ordinary or running.granted:
            return False
        # a late request yields to requests whose targets it endangers
        return waiting.targets.ttft is not None or running.asked.slo.best_effort

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        return None

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        """Do nothing: order of arrival does not depend on the tokens served."""

    def sampled(self, requests: Sequence[Request]) -> None:
        # derived policies may count tokens one by one
        for request in requests:
            self.served(request, 0, 1)


def overrides(policy: SchedulingPolicy, *names: str) -> bool:
    """Whether a policy overrides one of these methods of ``FcfsPolicy``."""
    return any(getattr(type(policy), n, None) is not getattr(FcfsPolicy, n) for n in names)
