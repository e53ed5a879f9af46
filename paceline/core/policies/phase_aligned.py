"""The micro-batch window coalescer: arrivals wait for each other, and steps are never mixed."""

from __future__ import annotations

from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.queues.request_queue import WaitingQueue

__all__ = ["PhaseAlignedPolicy"]


class PhaseAlignedPolicy(FcfsPolicy):
    """Holds arrivals up to ``coalesce_window_s`` and computes them together.

    Arrivals are admitted when the oldest has waited the window, when ``coalesce_size`` are there,
    or when nothing runs that they would interrupt.

    Wins: steps of one kind, where kernels do badly on mixed batches, and fewer interruptions of
    streams. Loses: the first token is later, and every stream stalls for whole prompts.
    """

    mixes = False

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        config = self._context.config
        if num_running == 0 or len(waiting) >= config.coalesce_size:
            return None
        head = waiting.peek()
        if head is None:
            return None
        until = head.asked.arrival_time + config.coalesce_window_s
        return None if until <= now else until
