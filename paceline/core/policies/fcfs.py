"""First come, first served, and the interface of all policies."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.config import SchedulerConfig
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.queues.request_queue import RequestQueue, WaitingQueue
from paceline.core.request import ORDER, Request
from paceline.core.slo import Slo
from paceline.core.tier import Tier

__all__ = ["FcfsPolicy", "PolicyContext", "overrides"]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Information for a policy, at birth."""

    config: SchedulerConfig
    # forecast of the engine's seconds for a request, learned online
    work: WorkEstimator


class FcfsPolicy:
    """First come, first served. The base class of all policies, which override what differs.

    A key is fixed when a request is added, so queues are heaps; a term that grows with waiting time
    must be linear in it (both sides of a comparison age alike, and ``now`` cancels).

    Wins: predictable, nothing starves. Loses: short requests wait behind long ones.
    """

    # False: a step computes either rows of one token or longer ones
    mixes = True
    # True: a tenant's requests are never left out to keep another tenant's on time
    keeps_tenants_apart = False
    # True: while answers stream, steps last at most ``SchedulerConfig.max_token_gap_s``
    bounds_gaps = False
    # late requests that were never started go newest first, where their wait is bounded
    serves_newest_late_first = False
    # increase of a request's key for each second that it arrives later
    key_per_second = 1.0

    def __init__(self, context: PolicyContext) -> None:
        self._context = context

    def make_queue(self) -> WaitingQueue:
        """Return a queue of waiting requests. Called once for each ``Tier``, which wait apart."""
        return RequestQueue()

    def assumed(self, request: Request) -> Slo:
        """Return the targets of a request that has just arrived: its own, or defaults."""
        return request.asked.slo

    def key(self, request: Request) -> float:
        """Return the request's key: a smaller one runs sooner, equal ones in order of arrival.
        Called once, on arrival, before the request may be refused."""
        return request.asked.arrival_time

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterable[Request]:
        """Yield waiting requests in the predicted order of admission. They are given in order: by
        tenant if the policy keeps tenants apart, else all in one row."""
        return heapq.merge(*waiting.values(), key=ORDER)

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Return the candidates, at least one and in order, that should give up blocks before
        others when the pool is empty; the work that each would lose decides among them."""
        return [r for r in candidates if r.best_effort and not r.granted] or candidates

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether ``running`` is preempted to admit ``waiting``. Called only if ``waiting`` comes
        first by ``queues.running.place``, or two requests would displace each other for ever; and
        ``running``, once it waits too, must not be admitted before ``waiting``, or both would swap
        in every step: a request of a later ``Tier`` displaces none of an earlier one, and none
        displaces one that ``keeps_slot``."""
        ordinary = Tier.ORDINARY
        if running.tier is ordinary or waiting.tier is not ordinary or running.keeps_slot:
            return False
        # a late request is demoted for requests whose targets it endangers
        return waiting.targets.ttft is not None or running.asked.slo.best_effort

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        """Return None to admit waiting requests, or the latest time to ask again."""
        return None

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        """Count tokens just spent on a request: uncached prompt tokens when it is first admitted,
        then output tokens, if ``sampled`` passes them on."""

    def sampled(self, requests: Sequence[Request]) -> None:
        """Count output tokens that a step just sampled, by a request for each of them."""
        # derived policies may count tokens one by one
        for request in requests:
            self.served(request, 0, 1)


def overrides(policy: FcfsPolicy, *names: str) -> bool:
    """Whether a policy overrides one of these methods of ``FcfsPolicy``."""
    return any(getattr(type(policy), n, None) is not getattr(FcfsPolicy, n) for n in names)
