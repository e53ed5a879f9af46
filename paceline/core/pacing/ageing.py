"""Best-effort requests that nobody lets in: after a time, the first of them is ordinary.

Best-effort work yields in many ways: its turn, room in a step, memory, the pressure valve, a band
that has more to lose. Under a steady stream of other work each of them may last for ever, and what
is let in may be preempted before it gets anywhere, again and again. So the best-effort request that
is the first to wait, and has been that for long enough altogether while others with more to lose
ran or waited, becomes ordinary work without targets: it holds others up if it must, is not
preempted before them, and waits for none of them that come later, whatever the policy's order says
of its own, nor for tenants that were served less. Among its equals alone it only waits its turn.

One at a time, or those who are late would take over an engine that has too much to do. So what this
costs others is one request's share of the engine at most, and nobody waits longer than it takes
those before him, one after another: whoever comes later makes no difference.

This module does not know why nobody let it in.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from paceline.core.pacing.view import Survey
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Move

__all__ = ["Patience"]

# seconds that somebody has to be the first to wait, at least
_LEAST: Final = 10.0


class Patience:
    """Owned by the planner.

    Args:
        seconds: that a request has to be the first to wait, if more than ``_LEAST``.
    """

    def __init__(self, waiting: WaitingRoom, seconds: float) -> None:
        self._waiting = waiting
        self._seconds = max(_LEAST, seconds)
        # who was the first at the last look, and when that was
        self._first: Request | None = None
        self._looked_at = 0.0
        # the latest who became ordinary
        self._promoted: Request | None = None

    def look(self, now: float, survey: Survey) -> None:
        """A step is about to be planned, and ``survey`` is of those that run."""
        before, self._first = self._first, None
        looked_at, self._looked_at = self._looked_at, now
        if self._promoted is not None:
            if self._promoted.status is not RequestStatus.FINISHED:
                self._advance(self._promoted)
                return
            self._promoted = None
        first = self._waiting.first_best_effort()
        if first is None or not self._is_held_up(first, survey):
            return
        # where the policy has several of them be the first by turns, it is never one alone
        has_turns = before is not None and before.order < first.order and before in self._waiting
        if before is not None and (before is first or has_turns):
            before.seconds_first += max(0.0, now - looked_at)
        self._first = first
        if first.seconds_first >= self._seconds:
            self._waiting.remove(first)
            first.move(Move.AGE)
            self._waiting.push(first)
            self._promoted = first
            self._advance(first)

    def _advance(self, promoted: Request) -> None:
        """While it waits, no ordinary request has a key before its own: by some policies there
        would always be another."""
        if promoted not in self._waiting:
            return
        self._waiting.remove(promoted)
        head = self._waiting.ordinary.peek()
        if head is not None and head.order[0] < promoted.order[0]:
            promoted.order = (head.order[0], promoted.order[1])
        self._waiting.push(promoted)

    def _is_held_up(self, first: Request, survey: Survey) -> bool:
        """Whether anybody runs or waits who has more to lose."""
        band = first.tier
        return (
            bool(survey.ordinary)
            or self._waiting.any_before(band)
            or any(r.tier < band for r in chain(survey.hurried, survey.best_effort))
        )
