"""Fair between tenants by tokens served: the virtual token counter."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final

from paceline.core.policies.base import PolicyContext
from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.queues.fair_queue import FairQueue
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.request import Request
from paceline.core.tenant_weights import TenantWeights
from paceline.core.tier import Tier

__all__ = ["OUTPUT_WEIGHT", "PROMPT_WEIGHT", "FairPolicy"]

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# tenants whose tokens are counted, at most, beside those that wait
_MAX_TENANTS: Final = 10_000
# light tenants can save up the tokens of so many of the largest steps: now and then the requests of
# one come close together
_SAVED_STEPS: Final = 4.0
# tenants that can be told to come next, at most: each costs microseconds, in nearly every step. A
# tenant's own requests alone are left out for one another, so others' are judged as well later
_MAX_LOOKS: Final = 64
_TENANT: Final = attrgetter("asked.tenant")


class FairPolicy(FcfsPolicy):
    """The waiting tenant with the least weighted tokens served goes first (VTC, OSDI'24, arXiv
    2401.00588); ``tenant_weights`` are shares, as in its weighted form. Only uncached prompt tokens
    count, so sharing a prefix is rewarded, not charged.

    A tenant that comes back from idle is lifted to a level that rises with what is served
    (``_Turns``), or to the least counter of those that wait if that is more. A light one is lifted
    less high: what a few of the largest steps may compute can be saved up, shared among those that
    ask. Two tenants that both always have requests waiting then differ by at most
    ``2 * max(PROMPT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the cache holds)``, and what
    one of them had saved up: each divided by its tenant's weight, as all that is served is. Each
    tier counts for itself. docs/adr/0015-virtual-time.md has the reasons.

    Wins: a light tenant is served at once whatever a heavy one floods. Loses: order of arrival
    across tenants, and some prefix hits.
    """

    keeps_tenants_apart = True
    bounds_gaps = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._weights = TenantWeights(context.config.tenant_weights)
        # by tier
        self._turns: list[_Turns] = []

    def key(self, request: Request) -> float:
        # ahead of whatever else runs by then
        early = self._context.config.best_effort_delay_s if request.favoured else 0.0
        return super().key(request) - early

    def make_queue(self) -> WaitingQueue:
        step = self._context.config.max_num_batched_tokens
        turns = _Turns(PROMPT_WEIGHT * _SAVED_STEPS * step, self._weights)
        self._turns.append(turns)
        return turns.queue

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterator[Request]:
        # each is taken to be served whole before the next is chosen
        heads: list[tuple[float, tuple[float, int], str, int]] = []
        # looked at as long as the first of all may be another tenant's; requests asked about are
        # ordinary, and so is the first
        tenants = islice(self._turns[Tier.ORDINARY].queue.in_order(), _MAX_LOOKS)
        following = next(tenants, None)
        while heads or following is not None:
            while following is not None and (not heads or following[:2] <= heads[0][:2]):
                counter, _, tenant = following
                if tenant in waiting:
                    heapq.heappush(heads, (counter, waiting[tenant][0].order, tenant, 0))
                following = next(tenants, None)
            if not heads:
                return
            counter, _, tenant, index = heads[0]
            own = waiting[tenant]
            request = own[index]
            yield request
            index += 1
            if index == len(own):
                heapq.heappop(heads)
                continue
            tokens = PROMPT_WEIGHT * request.num_new_tokens
            tokens += OUTPUT_WEIGHT * self._context.work.output_tokens(request)
            counter += tokens / self._weights.of(tenant)
            heapq.heapreplace(heads, (counter, own[index].order, tenant, index))

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        tokens = PROMPT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output
        self._turns[request.tier].charge({request.asked.tenant: tokens})

    def sampled(self, requests: Sequence[Request]) -> None:
        # a tenant once and not a token at a time, which took a fifth of a step's decision
        num_left = len(requests)
        for tier, turns in zip(Tier, self._turns, strict=True):
            own = [request for request in requests if request.tier is tier] if num_left else []
            num_left -= len(own)
            if own:
                counts = Counter(map(_TENANT, own))
                turns.charge({tenant: OUTPUT_WEIGHT * n for tenant, n in counts.items()})


class _Turns:
    """Of one tier: its queue, what each tenant was served, and the level where they come back.

    The level is the virtual time of fair queueing (Demers, Keshav and Shenker, SIGCOMM'89): the
    counter of a tenant that had always waited if what is served were handed out in drops, to all
    by their weights. So a token raises it by one part in the weights of those that share: those
    that wait, and those that do not but were served more than their share, until the level has come
    up with them. A waiting tenant is above it for a time, then, and later ones enter above it.

    What is served while no request waits is taken from no tenant: then the level is the largest
    counter that there ever was. No tenant enters above that, or further below the level than by
    what can be saved up: ``saved``, divided among those that share.
    """

    def __init__(self, saved: float, weights: TenantWeights) -> None:
        self.queue = FairQueue(self.counter, self._lift, weights)
        self._weights = weights
        self._saved = saved
        self._counters: dict[str, float] = {}
        # counters until some are forgotten
        self._most = _MAX_TENANTS
        self._largest = 0.0
        self._level = 0.0
        # by tenant that had saved something up when it came back last: how much further below the
        # level than others it entered. Without that it has been served no more than its share
        self._lent: dict[str, float] = {}
        # by tenant that does not wait, but was served more than its share until now: where the
        # level comes up with it, as it was when it was entered in the heap
        self._ahead: dict[str, float] = {}
        # (that, tenant); stale if it is another now, or none
        self._heap: list[tuple[float, str]] = []

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to a tenant, by its weight; lifts included."""
        return self._counters.get(tenant, 0.0)

    def charge(self, tokens: Mapping[str, float]) -> None:
        """``tokens``, weighted, are spent at once on requests of each of these tenants."""
        counters, weights = self._counters, self._weights
        for tenant, spent in tokens.items():
            counters[tenant] = counters.get(tenant, 0.0) + spent / weights.of(tenant)
        self._largest = max(self._largest, *map(counters.__getitem__, tokens))
        waiting = self.queue.tenants
        if waiting:
            for tenant in tokens:
                if tenant not in waiting and tenant not in self._ahead:
                    self._enter(tenant)
            self._level += sum(tokens.values()) / weights.sum_of(waiting, self._ahead)
            heap = self._heap
            while heap and heap[0][0] <= self._level:
                entered, name = heapq.heappop(heap)
                if self._ahead.get(name) == entered:
                    del self._ahead[name]
                    # it has been served more since
                    self._enter(name)
        if len(self._counters) > self._most:
            self._forget()

    def _enter(self, tenant: str) -> None:
        """Count the tenant among those ahead, if it is."""
        reached = self.counter(tenant) + self._lent.get(tenant, 0.0)
        if reached > self._level:
            self._ahead[tenant] = reached
            heapq.heappush(self._heap, (reached, tenant))

    def _lift(self, request: Request, least: float | None) -> None:
        """Its tenant comes back, while the least counter of those that wait is ``least``."""
        tenant = request.asked.tenant
        self._ahead.pop(tenant, None)
        if least is None:
            self._level = max(self._level, self._largest)
            self._ahead.clear()
            self._heap.clear()
            self._lent.clear()
        else:
            self._level = max(self._level, least)
        own = self.counter(tenant)
        saved = 0.0
        if request.favoured:
            sharing = self._weights.sum_of(self.queue.tenants, self._ahead)
            saved = self._saved / (sharing or self._weights.of(tenant))
        counter = max(own, min(self._level - saved, self._largest))
        self._counters[tenant] = counter
        self._lent[tenant] = max(own, self._level) - counter

    def _forget(self) -> None:
        """Callers may name as many tenants as they like: of those that do not wait, the half that
        was served least begins anew. None enters a queue further below its level for it."""
        waiting = self.queue.tenants
        idle = sorted(
            (served, name) for name, served in self._counters.items() if name not in waiting
        )
        for _, name in idle[: len(idle) // 2]:
            del self._counters[name]
            self._ahead.pop(name, None)
            self._lent.pop(name, None)
        # nearly all of them may wait
        self._most = max(_MAX_TENANTS, 2 * len(self._counters))
