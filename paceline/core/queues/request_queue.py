"""Waiting requests: a heap by order, and one that is fair between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice, zip_longest
from typing import Final, Protocol

from paceline.core.request import Request

__all__ = ["FairQueue", "RequestQueue", "WaitingQueue"]

# entries looked at for each member asked for
_VISITS: Final = 4


class WaitingQueue(Protocol):
    """Requests that wait for admission. The scheduler pops the first, tries it, and pushes it back
    if it does not fit."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        ...

    def __contains__(self, request: Request) -> bool: ...

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """The first, or None when empty."""
        ...

    def first(self, count: int) -> list[Request]:
        """Members likely to be the next, in order, at most so many, and taking no longer the more
        there are in all. Changes nothing."""
        ...

    def pop(self) -> Request | None:
        """Take the first, or None when empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take a member out for good."""
        ...

    def check_integrity(self) -> None:
        """AssertionError unless every member can be popped exactly once."""
        ...


class RequestQueue:
    """Requests by ``order``: a heap with lazy removal, O(log n) amortised."""

    def __init__(self) -> None:
        # (*order, number of the push, request), flat: comparing nested tuples costs twice as much
        self._heap: list[tuple[float, int, int, Request]] = []
        # with the number of the push that counts: one that came back has an entry for each
        self._members: dict[str, tuple[int, Request]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._members.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def push(self, request: Request) -> None:
        self._num_pushed += 1
        self._members[request.request_id] = (self._num_pushed, request)
        heapq.heappush(self._heap, (*request.order, self._num_pushed, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._is_live(entry):
                return entry[3]
            heapq.heappop(heap)
        return None

    def first(self, count: int) -> list[Request]:
        heap = self._heap
        found: list[Request] = []
        # nodes of the heap whose parents were visited, the least first
        frontier = [(heap[0], 0)] if heap else []
        # stale entries are few, but need not be
        left = _VISITS * count
        while frontier and len(found) < count and left:
            left -= 1
            entry, index = heapq.heappop(frontier)
            if self._is_live(entry):
                found.append(entry[3])
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))
        return found

    def pop(self) -> Request | None:
        request = self.peek()
        if request is not None:
            heapq.heappop(self._heap)
            del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        # its heap entry goes when it surfaces, or here when most are stale
        del self._members[request.request_id]
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = list(filter(self._is_live, self._heap))
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[float, int, int, Request]) -> bool:
        member = self._members.get(entry[3].request_id)
        return member is not None and member[0] == entry[2]

    def check_integrity(self) -> None:
        live = [entry for entry in self._heap if self._is_live(entry)]
        assert sorted(entry[3].request_id for entry in live) == sorted(self._members), (
            "heap and members of the queue differ"
        )
        assert all(entry[:2] == entry[3].order for entry in live), "a member's order has changed"


class FairQueue:
    """One queue per tenant; the tenant served least goes first. Before all of them go requests that
    were promoted (``patience``), whoever asks: others would for ever be served less.

    Args:
        counter: tokens served to a tenant so far, weighted. It may only grow.
        on_return: called when a tenant comes back from idle, before its request is queued: with
            that and the least counter of those that have requests waiting; None: nobody has.
    """

    def __init__(
        self, counter: Callable[[str], float], on_return: Callable[[Request, float | None], None]
    ) -> None:
        self._counter = counter
        self._on_return = on_return
        self._promoted = RequestQueue()
        self._tenants: dict[str, RequestQueue] = {}
        # (counter, order of the head, tenant); stale once the counter or the head has moved on
        self._heap: list[tuple[float, tuple[float, int], str]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size + len(self._promoted)

    def __iter__(self) -> Iterator[Request]:
        for queue in (self._promoted, *self._tenants.values()):
            yield from queue

    @property
    def tenants(self) -> Collection[str]:
        """Those that have members, beside promoted ones."""
        return self._tenants.keys()

    def __contains__(self, request: Request) -> bool:
        queue = self._tenants.get(request.asked.tenant)
        return (queue is not None and request in queue) or request in self._promoted

    def push(self, request: Request) -> None:
        if request.aged:
            self._promoted.push(request)
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
        return self._promoted.peek() or self._peek_tenants()

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

    def first(self, count: int) -> list[Request]:
        """Who would come next if every tenant that is served one fell behind the others."""
        tenants = islice(self.in_order(), count)
        rows = [self._tenants[tenant].first(count) for _, _, tenant in tenants]
        rounds = chain(self._promoted.first(count), *zip_longest(*rows))
        return list(islice((request for request in rounds if request is not None), count))

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
            found, index = frontier[0]
            tenant = found[2]
            entry = None
            if tenant in self._tenants and tenant not in seen:
                entry = self._entry(tenant)
            if entry is not None and entry != found and entry[1] == found[1]:
                again = (entry, -1)
            else:
                again = None
            if again is not None:
                heapq.heapreplace(frontier, again)
            else:
                heapq.heappop(frontier)
            if index >= 0:
                for child in range(2 * index + 1, min(2 * index + 3, size)):
                    heapq.heappush(frontier, (heap[child], child))
            if entry is not None and entry == found:
                seen.add(tenant)
                yield entry

    def pop(self) -> Request | None:
        if self._promoted:
            return self._promoted.pop()
        request = self._peek_tenants()
        if request is not None:
            heapq.heappop(self._heap)
            self._tenants[request.asked.tenant].pop()
            self._left(request.asked.tenant)
        return request

    def remove(self, request: Request) -> None:
        if request in self._promoted:
            self._promoted.remove(request)
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
        self._promoted.check_integrity()
        entered = {(order, tenant) for _, order, tenant in self._heap}
        for tenant, queue in self._tenants.items():
            queue.check_integrity()
            head = queue.peek()
            assert head is not None, f"tenant {tenant!r} has an empty queue"
            assert (head.order, tenant) in entered, f"tenant {tenant!r} would never be served"
