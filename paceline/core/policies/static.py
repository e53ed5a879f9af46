"""Static batching, which tutorials begin with, to compare with."""

from __future__ import annotations

import heapq
import math
from typing import Final

from paceline.core.policies.fcfs import FcfsPolicy, PolicyContext
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.request import ORDER

__all__ = ["StaticPolicy"]

_NONE: Final = (-math.inf, 0)


class StaticPolicy(FcfsPolicy):
    """First come, first served, in batches: the requests that wait when none runs, at most
    ``max_num_seqs``, and no other until all of them have ended.

    Wins: streams are interrupted by the prompts of their own batch alone. Loses: places stay empty
    until the longest output of the batch has ended, and arrivals wait that long.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        # the place in the queue of the batch's last request
        self._last = _NONE

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        if num_running == 0:
            batch = heapq.nsmallest(self._context.config.max_num_seqs, waiting, key=ORDER)
            self._last = batch[-1].order if batch else _NONE
            return None
        head = waiting.peek()
        # no moment ends the wait, but the end of the last running request
        return None if head is not None and head.order <= self._last else math.inf
