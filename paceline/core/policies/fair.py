"""Fair between tenants by tokens served: the virtual token counter."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from paceline.core.policies.base import PolicyContext
from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.queues import FairQueue, WaitingQueue
from paceline.core.request import Request

__all__ = ["OUTPUT_WEIGHT", "PROMPT_WEIGHT", "FairPolicy"]

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# whose tokens are counted, at most, beside those that wait
_MAX_TENANTS: Final = 10_000


class FairPolicy(FcfsPolicy):
    """The waiting tenant with the least weighted tokens served goes first (VTC, OSDI'24, arXiv
    2401.00588). Only uncached prompt tokens count, so sharing a prefix is rewarded, not charged.

    A tenant that comes back from idle is lifted to the least counter that there was among those
    waiting; where nobody waits, to that of the last who did, or whoever had the machine for itself
    would wait for that once others come. A light one is lifted less high, by what one step may
    compute: so much, and no more, can be saved up, so that the second request of one that asks for
    little need not wait because the first was large. What was least once stays the measure: those
    that come back one after another are lifted alike and go in order of arrival, not each below the
    one before it. Two tenants that both always have requests waiting then differ by at most
    ``2 * max(PROMPT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the cache holds)``, and what
    one of them had saved up.

    Wins: a light tenant is served at once whatever a heavy one floods. Loses: order of arrival
    across tenants, and some prefix hits.
    """

    keeps_tenants_apart = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._counters: dict[str, float] = {}
        self._queues: list[FairQueue] = []
        # counters until some are forgotten
        self._most = _MAX_TENANTS
        self._saved = PROMPT_WEIGHT * context.config.max_num_batched_tokens

    def key(self, request: Request) -> float:
        # ahead of whatever else runs by then
        early = self._context.config.best_effort_delay_s if request.favoured else 0.0
        return super().key(request) - early

    def make_queue(self) -> WaitingQueue:
        queue = FairQueue(self.counter, _Level(self._counters, self._saved).lift)
        self._queues.append(queue)
        return queue

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to ``tenant``, lifts included."""
        return self._counters.get(tenant, 0.0)

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterator[Request]:
        # as if each were served whole before the next is chosen
        heads: list[tuple[float, tuple[float, int], str, int]] = []
        # as long as the first of all may be another tenant's; whoever is asked about is not best
        # effort, so it waits in the first of the queues
        tenants = self._queues[0].in_order()
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
            counter += PROMPT_WEIGHT * request.num_new_tokens
            counter += OUTPUT_WEIGHT * self._context.work.output_tokens(request)
            heapq.heapreplace(heads, (counter, own[index].order, tenant, index))

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        self._counters[request.tenant] = (
            self.counter(request.tenant) + PROMPT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output
        )
        if len(self._counters) > self._most:
            self._forget()

    def _forget(self) -> None:
        """Whoever calls may name as many tenants as they like: of those who do not wait, the half
        that was served least begins anew. Nobody enters a queue further below its level for it."""
        waiting = {tenant for queue in self._queues for tenant in queue.tenants}
        idle = sorted(
            (served, name) for name, served in self._counters.items() if name not in waiting
        )
        for _, name in idle[: len(idle) // 2]:
            del self._counters[name]
        # nearly all of them may wait
        self._most = max(_MAX_TENANTS, 2 * len(self._counters))


class _Level:
    """Of one queue: the largest counter that somebody who came back was measured by. It only grows,
    and no tenant enters further below it than by what can be saved up; so nobody who waits ever has
    less than the next to enter, but for that."""

    def __init__(self, counters: dict[str, float], saved: float) -> None:
        self._counters = counters
        self._saved = saved
        self._level = 0.0

    def lift(self, request: Request, least: float) -> None:
        """Its tenant comes back, and is measured by ``least`` (``FairQueue``)."""
        self._level = max(self._level, least)
        lowest = self._level - self._saved if request.favoured else self._level
        own = self._counters.get(request.tenant, 0.0)
        self._counters[request.tenant] = max(own, lowest)
