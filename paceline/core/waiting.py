"""Requests that wait: the policy's queue, what it adds up to, and why it does not move.

This module does not know which policy orders it or what runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from paceline.core.kv_cache import KVCacheManager
from paceline.core.queues import WaitingQueue
from paceline.core.request import Request
from paceline.core.waits import WaitClocks

__all__ = ["WaitingRoom"]


_ORDER = attrgetter("order")


def _is_targeted(request: Request) -> bool:
    # all of it stays as it is while a request waits
    return (
        request.slo.ttft is not None
        and not request.slo.best_effort
        and request.first_scheduled_time is None
    )


class WaitingRoom:
    """All requests that could run next. Those that wait for an event are elsewhere (``forks``).

    Args:
        queue: orders them; nobody else may change it.
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self.queue = queue
        self.clocks = WaitClocks()
        self._kv = kv
        # members that hold blocks: forks, and those whose swapped blocks were fetched ahead
        self._holders: dict[str, Request] = {}
        # members with a TTFT target that may still be met, by order
        self._targeted: list[Request] = []
        # [all others, best effort]
        self._num_requests = [0, 0]
        self._num_tokens = [0, 0]

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.queue)

    def __contains__(self, request: Request) -> bool:
        return request in self.queue

    def enter(self, request: Request, now: float) -> None:
        """A request begins to wait."""
        request.waiting_since = now
        request.waits_before = self.clocks.reading()
        self.push(request)

    def leave(self, request: Request, now: float) -> None:
        """A popped request was admitted: add up what it waited for."""
        waited = max(0.0, now - request.waiting_since)
        spent = self.clocks.since(request.waits_before, waited)
        if request.waits:
            spent = [old + new for old, new in zip(request.waits, spent, strict=True)]
        request.waits = spent

    def push(self, request: Request) -> None:
        """Put a request at its place; one that was popped goes on waiting."""
        band = request.slo.best_effort
        self._num_requests[band] += 1
        self._num_tokens[band] += request.num_prompt_tokens
        if request.block_ids:
            self._holders[request.request_id] = request
        if _is_targeted(request):
            insort(self._targeted, request, key=_ORDER)
        self.queue.push(request)

    def peek(self) -> Request | None:
        return self.queue.peek()

    def pop(self) -> Request | None:
        request = self.queue.pop()
        if request is not None:
            self._uncount(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a member out for good."""
        self.queue.remove(request)
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        band = request.slo.best_effort
        self._num_requests[band] -= 1
        self._num_tokens[band] -= request.num_prompt_tokens
        self._holders.pop(request.request_id, None)
        if _is_targeted(request):
            del self._targeted[bisect_left(self._targeted, request.order, key=_ORDER)]

    @property
    def targeted(self) -> Sequence[Request]:
        """Members whose first token is due at some time and has not come, in order."""
        return self._targeted

    def ahead_of(self, request: Request) -> tuple[int, int]:
        """(requests, prompt tokens) taken to be served before a newcomer: all of them, less best
        effort unless it is that itself."""
        bands = 2 if request.slo.best_effort else 1
        return sum(self._num_requests[:bands]), sum(self._num_tokens[:bands])

    def prefetch(self) -> None:
        """Fetch the swapped blocks of the first, if it has any and there is room."""
        head = self.queue.peek()
        if head is not None and not head.num_pending_tokens and self._kv.prefetch(head):
            self._holders[head.request_id] = head

    def drop_blocks(self) -> bool:
        """Take blocks back from all who hold some; True if anybody did."""
        holders = list(self._holders.values())
        for request in holders:
            self._kv.free(request)
        self._holders.clear()
        return bool(holders)

    def check_integrity(self) -> None:
        """AssertionError unless counts and members agree."""
        members = list(self.queue)
        for request in members:
            assert bool(request.block_ids) == (request.request_id in self._holders), (
                f"request {request.request_id} waits with blocks that nobody could take back"
            )
        assert set(self._holders) <= {request.request_id for request in members}
        assert self._targeted == sorted(filter(_is_targeted, members), key=_ORDER)
        bands = [[r for r in members if r.slo.best_effort is band] for band in (False, True)]
        assert [len(band) for band in bands] == self._num_requests
        assert [sum(r.num_prompt_tokens for r in band) for band in bands] == self._num_tokens
        self.queue.check_integrity()
