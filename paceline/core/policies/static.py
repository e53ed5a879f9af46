"""Static batching, which tutorials begin with, to compare with."""

from __future__ import annotations

import math

from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.queues.request_queue import WaitingQueue

__all__ = ["StaticPolicy"]


class StaticPolicy(FcfsPolicy):
    """First come, first served, admitted only when no request runs. A batch is what one step
    begins: at most ``max_num_seqs`` requests, and ``max_num_batched_tokens`` of their prompts.

    Wins: nothing here; streams are never interrupted by prompts. Loses: places stay empty until
    the longest output of the batch has ended, and arrivals wait that long.
    """

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        # no moment ends the wait, but the end of the last running request
        return math.inf if num_running else None
