"""Static batching, which tutorials begin with, to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.policies.fcfs import FcfsPolicy, PolicyContext
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.request import Request

__all__ = ["StaticPolicy"]


class StaticPolicy(FcfsPolicy):
    """First come, first served, in batches: the requests that wait when none runs, at most
    ``max_num_seqs``, and no other until all of them have ended.

    Wins: streams are interrupted by the prompts of their own batch alone. Loses: places stay empty
    until the longest output of the batch has ended, and arrivals wait that long.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        # requests of the batch that one step's tokens had no room for yet
        self._left = 0

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        if num_running == 0:
            self._left = min(len(waiting), self._context.config.max_num_seqs)
            return None
        # no moment ends the wait, but the end of the last running request
        return None if self._left > 0 else math.inf

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        self._left -= num_output == 0

    def sampled(self, requests: Sequence[Request]) -> None:
        """Count nothing: a batch is made of requests, however long they are."""
