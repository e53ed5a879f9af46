"""Priority with real preemption."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.policies.fcfs import FcfsPolicy, PolicyContext
from paceline.core.request import Request

__all__ = ["PriorityPolicy"]


class PriorityPolicy(FcfsPolicy):
    """Lower ``priority`` first; waiting ``priority_ageing_s`` is worth one level.

    Effective priority after waiting w is ``priority - w / ageing``. Comparing two requests at any
    time gives the same answer as comparing ``priority + arrival / ageing``, which is the key. A
    request displaces another only if it is better both by ``priority`` and after ageing, so an old
    low-priority request, once admitted, is left to finish; and only if its ``Tier`` is no later.

    Wins: urgent work overtakes at once. Loses: preempted work is recomputed.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.key_per_second = 1.0 / context.config.priority_ageing_s

    def key(self, request: Request) -> float:
        ageing = self._context.config.priority_ageing_s
        return request.asked.priority + request.asked.arrival_time / ageing

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        last = super().expendable(candidates)
        worst = max(request.asked.priority for request in last)
        return [request for request in last if request.asked.priority == worst]

    def displaces(self, waiting: Request, running: Request) -> bool:
        return super().displaces(waiting, running) or (
            # otherwise it would be admitted again before the request that displaced it
            waiting.tier <= running.tier
            and not running.keeps_slot
            and waiting.asked.priority < running.asked.priority
            and waiting.order < running.order
        )
