"""Shortest predicted work first."""

from __future__ import annotations

from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.request import Request

__all__ = ["SjfPolicy"]

# arrival seconds that one second of work is worth in the order
_STRETCH = 50.0


class SjfPolicy(FcfsPolicy):
    """Order by predicted seconds of work (prompt and learned output length), ageing with arrival.

    Wins: mean latency, when lengths differ and can be told from prompt length, max_tokens and
    class. Loses: the tail of long requests (SRPT with perfect lengths loses 35-50 % of P99, arXiv
    2606.18431), and everything when the prediction is noise.
    """

    def key(self, request: Request) -> float:
        return request.asked.arrival_time + _STRETCH * self._context.work.seconds(request)
