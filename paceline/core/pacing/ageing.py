"""Ageing: best-effort requests that are never admitted become ordinary, one at a time.

The best-effort request that is the first to wait, and has been that for long enough altogether
while requests of earlier tiers ran or waited, ages: it becomes ordinary work without targets. It
holds others up if it must, is not preempted before them, and waits for none of them that arrive
later, whatever the policy's order, nor for tenants that were served less. Among its equals alone a
request only waits its turn. docs/adr/0012-ageing.md says why, and why one at a time.

This module does not know why a request was not admitted.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Final

from paceline.core.pacing.view import RunningView
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Move

__all__ = ["Ageing"]

# seconds that a request has to be the first to wait, at least
_LEAST: Final = 10.0
_AGE: Final = methodcaller("move", Move.AGE)


class Ageing:
    """Asked at every step.

    Args:
        seconds: that a request has to be the first to wait, if more than ``_LEAST``.
    """

    def __init__(self, waiting: WaitingRoom, seconds: float) -> None:
        self._waiting = waiting
        self._seconds = max(_LEAST, seconds)
        # the request that was first at the last look, and when that was
        self._first: Request | None = None
        self._looked_at = 0.0
        # the last request that aged
        self._aged: Request | None = None

    def rest(self) -> None:
        """The last request has ended."""
        self._first = self._aged = None

    def look(self, now: float, view: RunningView) -> None:
        """A step is about to be planned, and ``view`` is of the running requests."""
        before, self._first = self._first, None
        looked_at, self._looked_at = self._looked_at, now
        if self._aged is not None and self._aged.status is not RequestStatus.FINISHED:
            if self._aged in self._waiting:
                self._waiting.move(self._aged, self._go_first)
            return
        self._aged = None
        first = self._waiting.oldest_best_effort()
        if first is None or not self._is_held_up(first, view):
            return
        # under some policies several of them are the first by turns, and it is never one alone
        has_turns = before is not None and before.order < first.order and before in self._waiting
        if before is not None and (before is first or has_turns):
            before.seconds_first += max(0.0, now - looked_at)
        self._first = first
        if first.seconds_first >= self._seconds:
            self._waiting.move(first, _AGE)
            self._waiting.move(first, self._go_first)
            self._aged = first

    def _is_held_up(self, first: Request, view: RunningView) -> bool:
        """Whether a request of an earlier tier runs or waits."""
        return (
            bool(view.ordinary)
            or any(self._waiting.num_tokens[: first.tier])
            or any(request.tier < first.tier for request in view.best_effort)
        )

    def _go_first(self, aged: Request) -> None:
        """While it waits, no ordinary request has a key before its own: by some policies there
        would always be another."""
        head = self._waiting.ordinary.peek()
        if head is not None and head.order[0] < aged.order[0]:
            aged.order = (head.order[0], aged.order[1])
