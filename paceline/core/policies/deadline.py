"""Earliest deadline, adjusted by the remaining work."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.request import Request
from paceline.core.slo import Slo

__all__ = ["DeadlinePolicy", "patience"]

# default time to first token, s, of a request without any target
_PATIENCE = 10.0
# number of priority levels, up or down, that have an effect
_LEVELS = 4


def patience(request: Request) -> float:
    """Return the factor of priority on the default time to first token, 2 for each level."""
    return float(2.0 ** max(-_LEVELS, min(_LEVELS, request.asked.priority)))


class DeadlinePolicy(FcfsPolicy):
    """Order by the latest moment at which a request must start to meet its targets.

    That is its TTFT deadline less the predicted time of its prompt, or its whole deadline less all
    its predicted work, whichever is earlier (least slack first; the hybrid of Niyama, arXiv
    2503.22562, with the work as the second term). A request without a target for its first token
    has ``default_ttft_s``, or ten seconds; each level of its priority doubles or halves either.

    Wins: attainment when targets differ. Loses: at overload plain EDF serves late requests first
    and all miss; hopeless requests must be demoted, and the scheduler does that.
    """

    bounds_gaps = True
    serves_newest_late_first = True

    def assumed(self, request: Request) -> Slo:
        own, config = request.asked.slo, self._context.config
        ttft, tpot = own.ttft, own.tpot
        if own.best_effort:
            return own
        if ttft is None and config.default_ttft_s is not None:
            ttft = config.default_ttft_s * patience(request)
        if tpot is None:
            tpot = config.default_tpot_s
        return own if (ttft, tpot) == (own.ttft, own.tpot) else replace(own, ttft=ttft, tpot=tpot)

    def key(self, request: Request) -> float:
        targets, arrival = request.targets, request.asked.arrival_time
        work = self._context.work
        latest = []
        if targets.ttft is not None:
            latest.append(targets.ttft - work.prompt_seconds(request.num_new_tokens))
        if targets.deadline is not None:
            latest.append(targets.deadline - work.seconds(request))
        return arrival + min(latest, default=_PATIENCE * patience(request))
