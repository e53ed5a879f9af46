"""Earliest deadline, adjusted by the work that is left."""

from __future__ import annotations

from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.request import Request

__all__ = ["DeadlinePolicy"]

# seconds a request without any target is content to wait
_PATIENCE = 10.0
# levels of priority that count
_LEVELS = 4


class DeadlinePolicy(FcfsPolicy):
    """By the latest moment at which a request must start to meet its targets.

    That is its TTFT deadline less the predicted time of its prompt, or its whole deadline less all
    its predicted work, whichever is earlier (least slack first; the hybrid of Niyama, arXiv
    2503.22562, with the work as the second term). A request without either is content to wait for
    ten seconds, doubled or halved by each level of its priority.

    Wins: attainment when targets differ. Loses: at overload plain EDF serves the late first and all
    miss; requests that are hopeless must be demoted, and here they are.
    """

    bounds_gaps = True

    def key(self, request: Request) -> float:
        targets, arrival = request.targets, self._arrival(request)
        work = self._context.work
        latest = []
        if targets.ttft is not None:
            latest.append(targets.ttft - work.prompt_seconds(request.num_new_tokens))
        if targets.deadline is not None:
            latest.append(targets.deadline - work.seconds(request))
        if not latest:
            # each level doubles or halves the patience, so no level is starved by another
            level = max(-_LEVELS, min(_LEVELS, request.asked.priority))
            latest = [_PATIENCE * 2.0**level]
        return arrival + min(latest)
