"""The guaranteed share: what best effort gets of an engine that promised work would fill alone.

Best effort is served from what promised work leaves. While it waits for more than that, it earns
``best_effort_share`` of the engine's seconds, and may spend them at the expense of promised work: a
free place before the first ordinary request, or rows and chunks beyond the time that others'
targets leave. So its wait is bounded by the work before it divided by the share, and what promised
work pays is bounded by the share. The deadline server of Linux's scheduler does the same for
ordinary tasks beside real-time ones.

Seconds are predicted ones of steps. A request that holds one of ``max_num_seqs`` places while all
are taken, or blocks while memory is what requests wait for, costs that part of every step. What
best effort gets from what others leave counts as paid, for some seconds in advance too: under
bursts it is served between them and costs promised work nothing.

A late request that was never started is not best effort as its caller asked: it has no share where
its wait is bounded by ``queue_timeout_s``, and gets what is left over until then.

This module does not know how a step is filled.
"""

from __future__ import annotations

import math
from typing import Final

from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["GuaranteedShare"]

# seconds of earning that can be saved up, and after which of debt a request yields its place; where
# it would have to be computed again, it yields later, up to so many
_SAVED: Final = 1.0
_OWED: Final = 5.0
# seconds of earning: a larger debt is forgiven, so that the next request does not wait for longer
_DEBT: Final = 20.0
# seconds of earning: the most that what was left over counts as paid in advance
_AHEAD: Final = 10.0
# tokens of a small chunk, which can always be saved up for
_TILE: Final = 16
# one in so many steps is without background rows
_LOOK: Final = 32
# seconds over which the part of promised work is taken
_LATELY: Final = 60.0
# of the engine, what is left over for work without a share is taken to be at least this
_LEAST_LEFT: Final = 0.01


class GuaranteedShare:
    """Counts in seconds what best effort has earned and spent. One per scheduler, asked at every
    step that is paced."""

    def __init__(self, state: SchedulerState) -> None:
        config = state.config
        self._state, self._model = state, state.step_time
        self._share = config.best_effort_share
        # what rows add to a step is only limited where steps are sized by their time
        self._meters = config.adaptive_token_budget
        self._bounded = config.queue_timeout_s is not None
        # seconds earned and not spent; below 0: spent in advance
        self.credit = 0.0
        # seconds of the last step that were paid for while it was filled
        self._charged = 0.0
        self._last: Step | None = None
        # seconds of the engine that promised work took, forgotten exponentially, and as of when
        self._promised_seconds = self._as_of = 0.0
        # since ordinary requests run without a pause
        self._steps_beside = 0

    def rest(self) -> None:
        """The last request has ended."""
        self.credit = self._charged = 0.0
        self._last = None

    def has_share(self, request: Request) -> bool:
        """Whether a best-effort request may spend what is earned."""
        return (
            request.asked.slo.best_effort
            or request.first_scheduled_time is not None
            or not self._bounded
        )

    # ------------------------------------------------------------------ earned and spent

    def begin(self, view: RunningView, starts: float) -> None:
        """A step that begins at ``starts`` is about to be planned: settle the one before it."""
        last, self._last = self._last, None
        charged, self._charged = self._charged, 0.0
        waiting = self._state.waiting
        if last is not None:
            self._note_promised(view, last, starts)
        if not self._share or not (view.ordinary or len(waiting.ordinary)):
            # there is no promised work to take anything from
            self.credit = min(self.credit, 0.0) if view.best_effort else 0.0
            return
        if last is not None and last.rows and self._model.ready:
            own = [request for request in view.best_effort if self.has_share(request)]
            self._settle(last, own, len(view.best_effort), charged)

    def _settle(self, last: Step, own: list[Request], num_running: int, charged: float) -> None:
        """Count what the last step, of which ``charged`` seconds are paid, was for running requests
        that have a share: ``own`` of ``num_running`` best-effort ones."""
        seconds = self._model.predict(last.shape)
        if own or self._first() is not None:
            self.credit += self._share * seconds
        granted = [request for request in own if request.granted]
        spent = max(0.0, seconds * self._part(granted) - charged)
        self.credit -= spent
        if own:
            left_over = seconds * self._part(own)
            if last.ordinary_seconds is not None:
                time = (seconds - last.ordinary_seconds) * len(own) / num_running
                left_over = max(left_over, time)
            free = max(0.0, left_over - spent - charged)
            least = -self._share * (_SAVED if self._steady() else _AHEAD)
            self.credit = max(min(self.credit, least), self.credit - free)
        self.credit = max(-_DEBT * self._share, min(self.credit, self._most(own)))
        for request in granted:
            lost = min(self._state.running.seconds_lost(request), _OWED * self._share)
            request.granted = self.credit > -max(_SAVED * self._share, lost)

    def _steady(self) -> bool:
        """Whether background work wants its share in every few seconds: unlike work with targets,
        it has nothing else that bounds its wait."""
        state, tier = self._state, Tier.BACKGROUND
        waits = any(head.tier is tier for head in state.waiting.best_effort_heads())
        return waits or bool(state.running.most_tokens[tier])

    def _note_promised(self, view: RunningView, last: Step, starts: float) -> None:
        """Count what the last step was for promised work."""
        self._promised_seconds *= math.exp(min(0.0, self._as_of - starts) / _LATELY)
        self._as_of = starts
        if last.rows and self._model.ready:
            seconds = self._model.predict(last.shape)
            time = seconds if last.ordinary_seconds is None else last.ordinary_seconds
            places = seconds * self._part(view.ordinary)
            self._promised_seconds += max(places, time * (not places))

    def left_over(self, request: Request, now: float) -> float:
        """The part of the engine that a best-effort or late request and its like get now."""
        state = self._state
        if not state.running.most_tokens[Tier.ORDINARY] and not len(state.waiting.ordinary):
            return 1.0
        lately = self._promised_seconds * math.exp(min(0.0, self._as_of - now) / _LATELY) / _LATELY
        least = self._share if self.has_share(request) else 0.0
        return max(least, _LEAST_LEFT, 1.0 - lately)

    def planned(self, step: Step) -> None:
        """The step that is filled next."""
        self._last = step

    def charge(self, seconds: float) -> None:
        """Best-effort rows are predicted to have made a step so much longer for others."""
        self.credit -= seconds
        self._charged += seconds

    def _part(self, requests: list[Request]) -> float:
        """The part of the engine that running requests take from those that wait for places or
        memory."""
        state = self._state
        if not requests:
            return 0.0
        if len(state.running.requests) >= state.config.max_num_seqs:
            return len(requests) / state.config.max_num_seqs
        if state.last.held_by is Reason.MEMORY:
            return sum(len(request.block_ids) for request in requests) / state.cache.num_blocks
        return 0.0

    def _most(self, own: list[Request]) -> float:
        """Seconds that can be saved up: enough for a small chunk, and for the longest row."""
        tile = self._model.predict(StepShape().plus(0, _TILE))
        keys = max((request.num_computed_tokens for request in own), default=0)
        return max(_SAVED * self._share, tile, self._model.row_seconds(keys))

    # ------------------------------------------------------------------ asked by steps

    def _first(self) -> Request | None:
        """Of the first best-effort requests of each tier that wait and have a share, the one that
        comes first by order alone: no tier waits for ever behind another."""
        heads = filter(self.has_share, self._state.waiting.best_effort_heads())
        return min(heads, key=_order, default=None)

    def turn(self) -> Request | None:
        """The waiting request that the next free place is for, ahead of ordinary ones; None: what
        was earned is spent."""
        return self._first() if self.credit > 0.0 else None

    @property
    def is_saved_up(self) -> bool:
        """Nothing more can be earned: the request whose turn it is holds others up."""
        return self.credit >= _SAVED * self._share > 0.0

    def tokens(self, view: RunningView) -> int:
        """Prompt tokens to be kept in the next step for the first granted request that runs, as far
        as they are paid for."""
        if self.credit <= 0.0 or not self._model.ready:
            return 0
        for request in view.best_effort:
            lacking = request.num_uncomputed_tokens
            if lacking > 1 and request.granted:
                base = view.base
                each = (
                    self._model.predict(base.plus(0, _TILE)) - self._model.predict(base)
                ) / _TILE
                return min(lacking, int(self.credit / max(each, 1e-9)))
        return 0

    def background_seconds(self, view: RunningView) -> float:
        """Predicted seconds of the next step beyond which background rows stay out of it: what they
        add is always at the expense of others, whatever these aim at."""
        if not self._meters or not view.ordinary or not self._model.ready:
            self._steps_beside = 0
            return math.inf
        self._steps_beside += 1
        if self._steps_beside % _LOOK == 1:
            # what a step takes without such rows is only known from steps without them
            return 0.0
        return self._model.predict(view.base) + max(0.0, self.credit)


def _order(request: Request) -> tuple[float, int]:
    return request.order
