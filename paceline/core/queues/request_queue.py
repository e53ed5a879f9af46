"""Waiting requests by order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from paceline.core.request import ORDER, Request

__all__ = ["RequestQueue", "WaitingQueue"]

# most heap entries to compare with a newcomer: of a larger heap, every n-th entry
_SAMPLED: Final = 256


class WaitingQueue(Protocol):
    """Requests that wait for admission. The scheduler pops the first, tries it, and pushes it back
    if it does not fit."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Yield all members, in no particular order."""

    def __contains__(self, request: Request) -> bool: ...

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """Return the first request, or None when the queue is empty."""

    def num_ahead(self, request: Request) -> int:
        """Return about how many members would be admitted before a newcomer, whose ``order[0]`` is
        set. Takes the same time for any number of members."""

    def pop(self) -> Request | None:
        """Take the first request, or None when the queue is empty."""

    def remove(self, request: Request) -> None:
        """Take a member out for good."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every member can be popped exactly once."""


class RequestQueue:
    """Requests by an order that is fixed while they wait: a heap with lazy removal, O(log n)
    amortised."""

    def __init__(self, order: Callable[[Request], tuple[float, int]] = ORDER) -> None:
        self._order = order
        # (*order, number of the push, request), flat: comparing nested tuples costs twice as much
        self._heap: list[tuple[float, int, int, Request]] = []
        # by id, the number of the valid push: a request pushed again has an entry for each push
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
        heapq.heappush(self._heap, (*self._order(request), self._num_pushed, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            # inlined ``_is_live``, to save the call
            _, _, number, request = heap[0]
            member = self._members.get(request.request_id)
            if member is not None and member[0] == number:
                return request
            heapq.heappop(heap)
        return None

    def num_ahead(self, request: Request) -> int:
        heap, key = self._heap, request.order[0]
        sample = heap[:: 1 + len(heap) // _SAMPLED]
        if not sample:
            return 0
        ahead = sum(entry[3].order[0] <= key for entry in sample)
        # assumes that entries of requests that left are spread evenly
        return round(ahead / len(sample) * len(self._members))

    def pop(self) -> Request | None:
        request = self.peek()
        if request is not None:
            heapq.heappop(self._heap)
            del self._members[request.request_id]
            if not self._members:
                self._heap.clear()
        return request

    def remove(self, request: Request) -> None:
        # its heap entry goes when it surfaces, or here when most are stale
        del self._members[request.request_id]
        if not self._members:
            self._heap.clear()
        elif len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = list(filter(self._is_live, self._heap))
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[float, int, int, Request]) -> bool:
        member = self._members.get(entry[3].request_id)
        return member is not None and member[0] == entry[2]

    def check_integrity(self) -> None:
        live = [entry for entry in self._heap if self._is_live(entry)]
        ids = sorted(entry[3].request_id for entry in live)
        assert ids == sorted(self._members), "heap and members of the queue differ"
        kept = all(entry[:2] == self._order(entry[3]) for entry in live)
        assert kept, "a member's order has changed"
