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


class FairQueue:
    """One queue per tenant; the tenant served least goes first. Before all of them go requests that
    have aged, of any tenant: others would for ever be served less.

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
        # (counter, order of the head, tenant); stale once the counter or the head has moved on
        self._heap: list[tuple[float, tuple[float, int], str]] = []
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
        queue = self._tenants.get(request.asked.tenant)
        if queue is None:
            first = self._peek_tenants()
            self._on_return(request, None if first is None else self._counter(first.asked.tenant))
            queue = self._tenants[request.asked.tenant] = RequestQueue()
        queue.push(request)
        self._size += 1
        if queue.peek() is request:
            self._enter(request.asked.tenant)

    def peek(self) -> Request | None:
        return self._aged.peek() or self._peek_tenants()

    def _peek_tenants(self) -> Request | None:
        while self._heap:
            counter, order, tenant = self._heap[0]
            queue = self._tenants.get(tenant)
            head = queue.peek() if queue is not None else None
            if head is not None and head.order == order and self._counter(tenant) == counter:
                return head
            heapq.heappop(self._heap)
            if head is not None and head.order == order:
                self._enter(tenant)
        return None

    def in_order(self) -> Iterator[tuple[float, tuple[float, int], str]]:
        """Of ``tenants``, served least first: (counter, order of its first, tenant). The queue must
        not change meanwhile. Each costs O(log k) if it is the k-th."""
        heap = self._heap
        size = len(heap)
        # nodes of the heap whose parents were visited, the least first; and at -1 those whose
        # counters have grown since they were entered
        frontier = [(heap[0], 0)] if heap else []
        seen: set[str] = set()
        while frontier:
            found, index = heapq.heappop(frontier)
            if index >= 0:
                for child in range(2 * index + 1, min(2 * index + 3, size)):
                    heapq.heappush(frontier, (heap[child], child))
            tenant = found[2]
            if tenant not in self._tenants or tenant in seen:
                continue
            entry = self._entry(tenant)
            if entry == found:
                seen.add(tenant)
                yield entry
            elif entry[1] == found[1]:
                heapq.heappush(frontier, (entry, -1))

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
        request = self._peek_tenants()
        if request is not None:
            heapq.heappop(self._heap)
            self._tenants[request.asked.tenant].pop()
            self._left(request.asked.tenant)
        return request

    def remove(self, request: Request) -> None:
        if request in self._aged:
            self._aged.remove(request)
            return
        queue = self._tenants[request.asked.tenant]
        was_head = queue.peek() is request
        queue.remove(request)
        self._left(request.asked.tenant, changed=was_head)

    def _left(self, tenant: str, *, changed: bool = True) -> None:
        self._size -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        elif changed:
            self._enter(tenant)

    def _enter(self, tenant: str) -> None:
        heapq.heappush(self._heap, self._entry(tenant))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._tenants):
            # a head that is tried and put back every step leaves an entry each time
            self._heap = list(map(self._entry, self._tenants))
            heapq.heapify(self._heap)

    def _entry(self, tenant: str) -> tuple[float, tuple[float, int], str]:
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
