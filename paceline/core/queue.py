"""Waiting requests in the policy's order: a heap with lazy removal."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from paceline.core.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Requests by ``order``; push, pop and remove in O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        return iter(self._members.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def push(self, request: Request) -> None:
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The first in order, or None when empty."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request | None:
        """Take the first in order, or None when empty."""
        request = self.peek()
        if request is not None:
            heapq.heappop(self._heap)
            del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a member out for good; its heap entry goes when it surfaces or most are stale."""
        del self._members[request.request_id]
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """AssertionError unless every member can be popped exactly once."""
        live = [r.request_id for _, r in self._heap if self._members.get(r.request_id) is r]
        assert sorted(live) == sorted(self._members), "heap and members of the queue differ"
