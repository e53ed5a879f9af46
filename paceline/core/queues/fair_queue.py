"""Waiting requests, fair between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Final

from paceline.core.queues.request_queue import RequestQueue
from paceline.core.request import Request

__all__ = ["FairQueue", "TenantWeights", "adapter_of"]

# most tenants whose tokens are counted, in addition to those that wait
_MAX_TENANTS: Final = 10_000
# number of tenants whose queues a forecast reads
_SAMPLED: Final = 256
_TENANT: Final = attrgetter("asked.tenant")

# a tenant's counter, the order of its first request, and its name: the smallest is served first
_Entry = tuple[float, tuple[float, int], str]


class TenantWeights:
    """Shares of tenants: of two that both always wait, one of weight 3 is served three times the
    tokens of one of weight 1. A tenant that ``weights`` does not name has weight 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)

    def of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def sum_of(self, *groups: Collection[str]) -> float:
        """Return the total weight of the tenants in ``groups``, which must be disjoint."""
        total = float(sum(map(len, groups)))
        for tenant, weight in self._weights.items():
            if any(tenant in group for group in groups):
                total += weight - 1.0
        return total


def adapter_of(request: Request) -> str:
    """Return the name under which a tenant's requests for an adapter share; "": the model alone."""
    adapter = request.asked.adapter
    return "" if adapter is None else adapter.key.hex()


class FairQueue:
    """One queue per tenant; the tenant served least goes first.

    A tenant that asks for adapters has one queue for each of them and one for the model, which
    share what the tenant gets, likewise by what they were served: so a flood of one adapter does
    not hold up the others, and a tenant gains nothing by many names.

    A tenant that returns from idle enters at a level, the virtual time of fair queueing (Demers,
    Keshav and Shenker, SIGCOMM'89): the counter that an always waiting tenant would have if tokens
    were handed out one by one, to all tenants by their weights. So a token raises the level by one
    divided by the weights of the sharing tenants: those that wait, those that do not but were
    served more than their share, until the level has reached their counter, and the one that it is
    served to. So a waiting tenant can be above the level for a time, and later ones enter above it.

    Tokens served while no request waits are taken from no tenant: the level then becomes the
    largest counter so far, above which no tenant enters.

    Args:
        saved: weighted tokens that light tenants may save up, divided among the sharing tenants.
        key: tells requests of different tenants apart; in a tenant's own queue, adapters.
    """

    def __init__(
        self, saved: float, weights: TenantWeights, key: Callable[[Request], str] = _TENANT
    ) -> None:
        self._saved, self._weights, self._key = saved, weights, key
        self._tenants: dict[str, RequestQueue | FairQueue] = {}
        # of tenants that have asked for adapters, waiting or not
        self._divided: dict[str, FairQueue] = {}
        # one entry of each tenant is up to date; in addition there may be stale ones
        self._heap: list[_Entry] = []
        self._size = 0
        self._counters: dict[str, float] = {}
        # number of counters at which some are forgotten
        self._most = _MAX_TENANTS
        self._largest = self._level = 0.0
        # by tenant that had saved up tokens when it returned last: how much further below the level
        # than others it entered. Without that it has been served no more than its share
        self._lent: dict[str, float] = {}
        # by tenant that does not wait but had more than its share: the level at its counter
        self._ahead: dict[str, float] = {}
        # a heap of (that level, tenant); stale if ``_ahead`` has another level or none
        self._reached: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for queue in self._tenants.values():
            yield from queue

    def __contains__(self, request: Request) -> bool:
        queue = self._tenants.get(self._key(request))
        return queue is not None and request in queue

    def push(self, request: Request) -> None:
        tenant = self._key(request)
        queue = self._tenants.get(tenant)
        if queue is None:
            first = self._first(self._heap)
            self._lift(request, None if first is None else self.counter(self._key(first)))
            queue = self._tenants[tenant] = self._divided.get(tenant, RequestQueue())
        if self._key is _TENANT and request.asked.adapter and tenant not in self._divided:
            queue = self._divide(tenant, queue)
        queue.push(request)
        self._size += 1
        if queue.peek() is request:
            self._enter(tenant)

    def _divide(self, tenant: str, queue: RequestQueue | FairQueue) -> FairQueue:
        divided = FairQueue(self._saved, TenantWeights({}), adapter_of)
        for each in queue:
            divided.push(each)
        self._tenants[tenant] = self._divided[tenant] = divided
        return divided

    def peek(self) -> Request | None:
        return self._first(self._heap)

    def _first(self, heap: list[_Entry]) -> Request | None:
        """Return the first request, whose entry is then at index 0: no stale one is before it."""
        while heap:
            counter, order, tenant = heap[0]
            queue = self._tenants.get(tenant)
            head = queue.peek() if queue is not None else None
            if head is None or head.order != order:
                heapq.heappop(heap)
            elif (served := self.counter(tenant)) != counter:
                heapq.heapreplace(heap, (served, order, tenant))
            else:
                return head
        return None

    def in_order(self) -> Iterator[_Entry]:
        """Yield the entries of waiting tenants, least served first, from a copy of the heap."""
        heap, last = self._heap.copy(), None
        while self._first(heap) is not None:
            # a tenant may have several equal entries
            if (entry := heapq.heappop(heap)) != last:
                yield (last := entry)

    def num_ahead(self, request: Request) -> int:
        """Estimate as if tenants took turns: one request each, or as many as their weights."""
        own, weights = self._tenants.get(self._key(request)), self._weights
        divided = self._divided.get(self._key(request))
        ahead = len(own or ()) if divided is None else divided.num_ahead(request)
        turns = 1 + ahead
        sample = list(islice(self._tenants.items(), _SAMPLED))
        if not sample:
            return 0
        each = turns / weights.of(self._key(request))
        others = sum(min(len(q), each * weights.of(name)) for name, q in sample if q is not own)
        return turns - 1 + round(others * len(self._tenants) / len(sample))

    def pop(self) -> Request | None:
        request = self._first(self._heap)
        if request is not None:
            heapq.heappop(self._heap)
            self._tenants[self._key(request)].pop()
            self._left(self._key(request))
        return request

    def remove(self, request: Request) -> None:
        self._tenants[self._key(request)].remove(request)
        self._left(self._key(request))

    def _left(self, tenant: str) -> None:
        """Update the heap after a request of the tenant has left."""
        self._size -= 1
        if self._tenants[tenant]:
            self._enter(tenant)
        else:
            del self._tenants[tenant]

    def _enter(self, tenant: str) -> None:
        heapq.heappush(self._heap, self._entry(tenant))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._tenants):
            # a head that is tried and put back in every step leaves an entry each time
            self._heap = list(map(self._entry, self._tenants))
            heapq.heapify(self._heap)

    def _entry(self, tenant: str) -> _Entry:
        head = self._tenants[tenant].peek()
        assert head is not None
        return self.counter(tenant), head.order, tenant

    def counter(self, tenant: str) -> float:
        """Return the weighted tokens served to a tenant, by its weight; lifts included."""
        return self._counters.get(tenant, 0.0)

    def charge(self, tokens: Mapping[str, float]) -> None:
        """Count weighted ``tokens`` spent at once on requests of each of these tenants."""
        counters, weights = self._counters, self._weights
        for tenant, spent in tokens.items():
            counters[tenant] = counters.get(tenant, 0.0) + spent / weights.of(tenant)
        self._largest = max(self._largest, *map(counters.__getitem__, tokens))
        waiting = self._tenants
        if waiting:
            for tenant in tokens:
                if tenant not in waiting and tenant not in self._ahead:
                    self._note_ahead(tenant)
            share, ahead = weights.sum_of(waiting, self._ahead), self._ahead
            for tenant, spent in tokens.items():
                # one that is served shares, too, also where none of its requests waits
                is_known = tenant in waiting or tenant in ahead
                self._level += spent / (share if is_known else share + weights.of(tenant))
            if self._key is not _TENANT:
                # an adapter in a flood has no more than the largest counter: others that ask now
                # and then, and come first, do not take its time
                self._level = min(self._level, self._largest)
            reached = self._reached
            while reached and reached[0][0] <= self._level:
                entered, name = heapq.heappop(reached)
                if self._ahead.get(name) == entered:
                    del self._ahead[name]
                    # the tenant was served more since then
                    self._note_ahead(name)
        if len(self._counters) > self._most:
            self._forget()

    @property
    def is_divided(self) -> bool:
        """Return whether tenants have asked for adapters: then ``charge_adapters`` is due too."""
        return bool(self._divided)

    def charge_adapters(self, tokens: Mapping[tuple[str, str], float]) -> None:
        """Count tokens that ``charge`` has counted, by tenant and ``adapter_of``."""
        for (tenant, adapter), spent in tokens.items():
            if (divided := self._divided.get(tenant)) is not None:
                divided.charge({adapter: spent})
                if tenant in self._tenants:
                    # another adapter's request may be the tenant's first now
                    self._enter(tenant)

    def _note_ahead(self, tenant: str) -> None:
        """Add the tenant to those ahead if it was served more than its share."""
        reached = self.counter(tenant) + self._lent.get(tenant, 0.0)
        if reached > self._level:
            self._ahead[tenant] = reached
            heapq.heappush(self._reached, (reached, tenant))

    def _lift(self, request: Request, least: float | None) -> None:
        """Set a returning tenant's counter; ``least`` is the least counter of waiting tenants."""
        tenant = self._key(request)
        self._ahead.pop(tenant, None)
        if least is None:
            self._level = max(self._level, self._largest)
            self._ahead.clear()
            self._reached.clear()
            self._lent.clear()
        else:
            self._level = max(self._level, least)
        own = self.counter(tenant)
        saved = 0.0
        if request.boosted:
            sharing = self._weights.sum_of(self._tenants, self._ahead)
            saved = self._saved / (sharing or self._weights.of(tenant))
        counter = max(own, min(self._level - saved, self._largest))
        self._counters[tenant] = counter
        self._lent[tenant] = max(own, self._level) - counter

    def _forget(self) -> None:
        """Drop half of the idle counters, those of the tenants served least, as callers may name
        any number of tenants. No tenant enters a queue further below its level because of it."""
        idle = sorted(
            (served, name) for name, served in self._counters.items() if name not in self._tenants
        )
        for _, name in idle[: len(idle) // 2]:
            del self._counters[name]
            self._ahead.pop(name, None)
            self._lent.pop(name, None)
            self._divided.pop(name, None)
        # nearly all of them may be waiting
        self._most = max(_MAX_TENANTS, 2 * len(self._counters))

    def check_integrity(self) -> None:
        assert self._size == sum(len(queue) for queue in self._tenants.values())
        entered = {(order, tenant) for _, order, tenant in self._heap}
        for tenant, queue in self._tenants.items():
            queue.check_integrity()
            head = queue.peek()
            assert head is not None, f"tenant {tenant!r} has an empty queue"
            assert (head.order, tenant) in entered, f"tenant {tenant!r} would never be served"
