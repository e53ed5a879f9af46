"""Who runs, in order, and what happens to one that has to stop.

This module does not know who should run, or why somebody has to stop.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Final

from paceline.core.memory.preemption import Preemption
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus

__all__ = ["Running"]

_ORDER: Final = attrgetter("order")


class Running:
    """Shared by all who plan a step."""

    def __init__(self, preemption: Preemption, waiting: WaitingRoom) -> None:
        self._preemption = preemption
        self._waiting = waiting
        # sorted by order; the list stays the same one
        self.requests: list[Request] = []
        # requests whose backend state is to be dropped by the next plan
        self.released: list[str] = []
        self.num_preemptions = 0

    def start(self, request: Request) -> None:
        """It was admitted and has its blocks."""
        request.status = RequestStatus.RUNNING
        request.history.told = False
        insort(self.requests, request, key=_ORDER)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it waits again at its place in the order."""
        self.num_preemptions += 1
        self._preemption.release(request)
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.requests.remove(request)
        self.released.append(request.request_id)
        self._waiting.enter(request, now)

    def prune(self) -> None:
        """Forget those that have ended."""
        running = RequestStatus.RUNNING
        self.requests[:] = [r for r in self.requests if r.status is running]
