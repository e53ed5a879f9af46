"""Best-effort requests: after everybody else, with what is left, band by band.

Both those that run and those that wait, in this order, so that nobody who has nothing to lose comes
before somebody who has (``Tier``).

This module does not know what ordinary requests got, or why.
"""

from __future__ import annotations

from typing import Final

from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.view import Survey
from paceline.core.queues.running import Running
from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.step.admission import Intake
from paceline.core.step.builder import Draft
from paceline.core.step.rows import Rows
from paceline.core.tier import Tier

__all__ = ["BestEffort"]

# bands, lowest and highest: who gets rows and is let in together, in order
_BANDS: Final = ((Tier.PROMISED, Tier.RELEGATED), (Tier.BACKGROUND, Tier.BACKGROUND))
# the same while deadlines press
_PRESSED: Final = tuple((band, band) for band in Tier if band is not Tier.ORDINARY)


class BestEffort:
    """Owned by the planner, with whom it shares what it is given."""

    def __init__(self, waiting: WaitingRoom, running: Running, rows: Rows, intake: Intake) -> None:
        self._waiting = waiting
        self._running = running
        self._rows = rows
        self._intake = intake

    def make_way(self, survey: Survey, now: float) -> Request:
        """Memory is nearly full and others run: the last of those with least to lose goes."""
        those = survey.best_effort or survey.hurried
        victim = max(those, key=lambda r: (r.tier, r.order))
        self._running.preempt(victim, now)
        return victim

    def fill(
        self,
        draft: Draft,
        survey: Survey,
        now: float,
        pressure: Pressure,
        held_by: Reason | None,
    ) -> Reason | None:
        """Rows for those that ran before, and admissions; nobody is let in if ``held_by`` says why
        nobody can be. Returns what holds the head of the queue up."""
        draft.seconds = min(draft.seconds, self._intake.most_seconds(draft))
        # those that ran before: whoever was let in just now has a row
        rest = [(request.tier, request) for request in survey.best_effort]
        for low, high in _PRESSED if self._waiting.pressing else _BANDS:
            rest = [entry for entry in rest if entry[1].status is RequestStatus.RUNNING]
            those = [request for band, request in rest if low <= band <= high]
            left = sum([band > high for band, _ in rest])
            late = self._rows.extend(draft, those, left, now, limited=True) if those else False
            if held_by is None and late and self._running.requests:
                held_by = Reason.MEMORY
            head = self._waiting.peek(best_effort=True)
            if held_by is None and head is not None and head.tier <= high:
                draft.budget -= left
                held_by = self._intake.let_in(draft, now, pressure, high)
                draft.budget += left
        return held_by
