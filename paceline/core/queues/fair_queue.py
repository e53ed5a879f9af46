"""Waiting requests, fair between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Final

from paceline.core.queues.request_queue import RequestQueue
from paceline.core.request import Request
from paceline.core.tenant_weights import TenantWeights

__all__ = ["FairQueue"]

# tenants whose queues are looked at for a forecast
_SAMPLED: Final = 256

# a tenant's counter, the order of its first request, and its name: the least is served first
_Entry = tuple[float, tuple[float, int], str]


class FairQueue:
    """One queue per tenant; the tenant served least goes first. Aged requests, of any tenant, go
    before all of them: there would always be a tenant that was served less.

    Args:
        counter: tokens served to a tenant so far, weighted. It may only grow.
        on_return: called when a tenant comes back from idle, before its request is queued: with
            that and the least counter of those that have requests waiting; None: none has.
        weights: the tenants' shares, for forecasts.
    """

    def __init__(
        self,
        counter: Callable[[str], float],
        on_return: Callable[[Request, float | None], None],
        weights: TenantWeights,
    ) -> None:
        self._counter = counter
        self._on_return = on_return
        self._weights = weights
        self._aged = RequestQueue()
        self._tenants: dict[str, RequestQueue] = {}
        # one of each tenant is up to date; beside it there may be stale ones
        self._heap: list[_Entry] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size + len(self._aged)

    def __iter__(self) -> Iterator[Request]:
        for queue in (self._aged, *self._tenants.values()):
            yield from queue

    @property
    def tenants(self) -> Collection[str]:
        """Those that have members, beside aged ones."""
        return self._tenants.keys()

    def __contains__(self, request: Request) -> bool:
        queue = self._tenants.get(request.asked.tenant)
        return (queue is not None and request in queue) or request in self._aged

    def push(self, request: Request) -> None:
        if request.aged:
            self._aged.push(request)
            return
        tenant = request.asked.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            first = self._first(self._heap)
            self._on_return(request, None if first is None else self._counter(first.asked.tenant))
            queue = self._tenants[tenant] = RequestQueue()
        queue.push(request)
        self._size += 1
        if queue.peek() is request:
            self._enter(tenant)

    def peek(self) -> Request | None:
        return self._aged.peek() or self._first(self._heap)

    def _first(self, heap: list[_Entry]) -> Request | None:
        """The request that a heap of entries has first, its entry at 0 then. Stale entries before
        it are dropped, or brought up to date."""
        while heap:
            counter, order, tenant = heap[0]
            queue = self._tenants.get(tenant)
            head = queue.peek() if queue is not None else None
            if head is None or head.order != order:
                heapq.heappop(heap)
            elif (served := self._counter(tenant)) != counter:
                heapq.heapreplace(heap, (served, order, tenant))
            else:
                return head
        return None

    def in_order(self) -> Iterator[_Entry]:
        """Of ``tenants``, served least first: (counter, order of its first, tenant). Each costs
        O(log n), and the first a copy of all entries."""
        heap, last = self._heap.copy(), None
        while self._first(heap) is not None:
            # a tenant may have several equal entries
            if (entry := heapq.heappop(heap)) != last:
                yield (last := entry)

    def num_ahead(self, request: Request) -> int:
        """As if tenants took turns: one request each, or as many as their weights are."""
        own = self._tenants.get(request.asked.tenant)
        turns = 1 + (len(own) if own is not None else 0)
        sample = list(islice(self._tenants.items(), _SAMPLED))
        if not sample:
            return len(self._aged)
        weights = self._weights
        each = turns / weights.of(request.asked.tenant)
        others = sum(
            min(len(queue), each * weights.of(tenant))
            for tenant, queue in sample
            if queue is not own
        )
        return len(self._aged) + turns - 1 + round(others * len(self._tenants) / len(sample))

    def pop(self) -> Request | None:
        if self._aged:
            return self._aged.pop()
        request = self._first(self._heap)
        if request is not None:
            heapq.heappop(self._heap)
            self._tenants[request.asked.tenant].pop()
            self._left(request.asked.tenant)
        return request

    def remove(self, request: Request) -> None:
        if request.aged:
            self._aged.remove(request)
            return
        self._tenants[request.asked.tenant].remove(request)
        self._left(request.asked.tenant)

    def _left(self, tenant: str) -> None:
        """A request of the tenant has left."""
        self._size -= 1
        if self._tenants[tenant]:
            self._enter(tenant)
        else:
            del self._tenants[tenant]

    def _enter(self, tenant: str) -> None:
        heapq.heappush(self._heap, self._entry(tenant))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._tenants):
            # a head that is tried and put back every step leaves an entry each time
            self._heap = list(map(self._entry, self._tenants))
            heapq.heapify(self._heap)

    def _entry(self, tenant: str) -> _Entry:
        head = self._tenants[tenant].peek()
        assert head is not None
        return self._counter(tenant), head.order, tenant

    def check_integrity(self) -> None:
        assert self._size == sum(len(queue) for queue in self._tenants.values())
        self._aged.check_integrity()
        entered = {(order, tenant) for _, order, tenant in self._heap}
        for tenant, queue in self._tenants.items():
            queue.check_integrity()
            head = queue.peek()
            assert head is not None, f"tenant {tenant!r} has an empty queue"
            assert (head.order, tenant) in entered, f"tenant {tenant!r} would never be served"
