"""Fairness between tenants by tokens served: the virtual token counter."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final

from paceline.core.policies.fcfs import FcfsPolicy, PolicyContext
from paceline.core.queues.fair_queue import FairQueue, TenantWeights, adapter_of
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.request import Request
from paceline.core.tier import Tier

__all__ = ["OUTPUT_WEIGHT", "PROMPT_WEIGHT", "FairPolicy"]

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# light tenants, whose requests may arrive close together, save up the tokens of so many full steps
_SAVED_STEPS: Final = 4.0
# most tenants that a forecast considers, as each costs microseconds; others are judged later
_MAX_LOOKS: Final = 64
# seconds by which a boosted request counts as arrived earlier: ahead of all that run by then
_EARLY: Final = 60.0
_TENANT: Final = attrgetter("asked.tenant")


class FairPolicy(FcfsPolicy):
    """The waiting tenant with the least weighted tokens served goes first (VTC, OSDI'24, arXiv
    2401.00588); ``tenant_weights`` are shares, as in its weighted form. Only uncached prompt tokens
    count, so sharing a prefix is rewarded, not charged.

    A tenant that returns from idle is lifted to a level, see ``FairQueue``, and a light one less
    high. The counters of two tenants that always wait then differ by at most
    ``2 * max(PROMPT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the cache holds)``, plus what
    one of them had saved up: each divided by its tenant's weight, like all tokens served. Each tier
    counts for itself. docs/adr/0015-virtual-time.md has the reasons.

    A tenant's tokens are shared out among the adapters that it asks for, in the same way; an
    adapter with few of the tenant's requests is light as a tenant is (``pacing.tenants``).

    Wins: a light tenant is served at once, however much a heavy one sends. Loses: some prefix hits.
    """

    keeps_tenants_apart = True
    bounds_gaps = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._weights = TenantWeights(context.config.tenant_weights)
        # by tier
        self._queues: list[FairQueue] = []

    def key(self, request: Request) -> float:
        return super().key(request) - (_EARLY if request.boosted else 0.0)

    def make_queue(self) -> WaitingQueue:
        step = self._context.config.max_num_batched_tokens
        queue = FairQueue(PROMPT_WEIGHT * _SAVED_STEPS * step, self._weights)
        self._queues.append(queue)
        return queue

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterator[Request]:
        # assumes that each request is served completely before the next is chosen
        heads: list[tuple[float, tuple[float, int], str, int]] = []
        # tenants are read while the first of all, an ordinary request, may be another tenant's
        tenants = islice(self._queues[Tier.ORDINARY].in_order(), _MAX_LOOKS)
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
        queue = self._queues[request.tier]
        queue.charge({request.asked.tenant: tokens})
        if queue.is_divided:
            queue.charge_adapters({(request.asked.tenant, adapter_of(request)): tokens})

    def sampled(self, requests: Sequence[Request]) -> None:
        # once for each tenant, as counting single tokens took a fifth of a step's planning time
        num_left = len(requests)
        for tier, queue in zip(Tier, self._queues, strict=True):
            own = [request for request in requests if request.tier is tier] if num_left else []
            num_left -= len(own)
            if own:
                counts = Counter(map(_TENANT, own))
                queue.charge({tenant: OUTPUT_WEIGHT * n for tenant, n in counts.items()})
                if queue.is_divided:
                    pairs = Counter((r.asked.tenant, adapter_of(r)) for r in own)
                    queue.charge_adapters({pair: OUTPUT_WEIGHT * n for pair, n in pairs.items()})
