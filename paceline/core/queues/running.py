"""Running requests, in order, and what happens to one that has to stop.

This module does not know which requests should run, or why one has to stop.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from paceline.core.memory.preemption import Preemption
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier

__all__ = ["RunningList"]

_ORDER: Final = attrgetter("order")


class RunningList:
    """The only place where requests begin to run, are preempted, and stop."""

    def __init__(self, preemption: Preemption, waiting: WaitingRoom, block_size: int) -> None:
        self.preemption = preemption
        self._block_size = block_size
        self._waiting = waiting
        # sorted by order; the list stays the same one
        self.requests: list[Request] = []
        # by tier: tokens whose place running requests may take at most, the last block of each as
        # if it were full
        self.most_tokens = [0] * len(Tier)
        # requests whose backend state is to be dropped by the next plan
        self._released: list[str] = []
        self.num_preemptions = 0
        # requests in the list that have ended
        self._num_ended = 0

    def start(self, request: Request) -> None:
        """The request was admitted and has its blocks."""
        request.status = RequestStatus.RUNNING
        request.told = False
        self.most_tokens[request.tier] += request.max_total_tokens + self._block_size
        insort(self.requests, request, key=_ORDER)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it waits again at its place in the order."""
        self.num_preemptions += 1
        self.preemption.release(request)
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.requests.remove(request)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._block_size
        self._released.append(request.request_id)
        self._waiting.enter(request, now)

    def stop(self, request: Request) -> None:
        """The request ends; it stays in the list until ``prune`` is called."""
        self._released.append(request.request_id)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._block_size
        self._num_ended += 1

    def prune(self) -> None:
        """Forget requests that have ended: all at once, for many of hundreds may end together."""
        if self._num_ended:
            self._num_ended, running = 0, RequestStatus.RUNNING
            self.requests[:] = [r for r in self.requests if r.status is running]

    def move(self, request: Request, change: Callable[[Request], None]) -> None:
        """Change a running request's tier or order, and put it at its new place."""
        most = request.max_total_tokens + self._block_size
        self.requests.remove(request)
        self.most_tokens[request.tier] -= most
        change(request)
        self.most_tokens[request.tier] += most
        insort(self.requests, request, key=_ORDER)

    def take_released(self) -> tuple[str, ...]:
        """Requests whose backend state is to be dropped, once each."""
        released, self._released = tuple(self._released), []
        return released

    def check_integrity(self) -> None:
        """AssertionError unless the list is in order and sums agree."""
        running = self.requests
        assert running == sorted(running, key=_ORDER), "running is out of order"
        for tier, most in enumerate(self.most_tokens):
            own = [r.max_total_tokens + self._block_size for r in running if r.tier == tier]
            assert sum(own) == most, f"tier {tier}: {most} tokens at most, {sum(own)} counted"
