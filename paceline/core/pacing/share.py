"""The guaranteed share: time for best effort on an engine that ordinary work would fill alone.

Best effort is served from what ordinary work leaves. While it waits for more, it earns
``best_effort_share`` of the engine's seconds, and may spend them at the expense of ordinary work:
on a free slot before the first ordinary request, or on rows and chunks beyond the time that others'
targets leave. So its wait is bounded by the work before it divided by the share, and the cost to
ordinary work by the share. The deadline server of Linux's scheduler does the same for ordinary
tasks next to real-time ones.

Seconds are predicted seconds of steps. Two things are counted, and the scarcer one decides: slots,
of which a request takes its part of every step while all are taken (blocks, while requests wait for
memory), and the time by which rows and chunks lengthen steps. Best effort that is served from what
others leave counts as paid, for some seconds in advance too, unless background work is here: under
bursts it is served between them and costs ordinary work nothing.

A late request is not best effort by its caller's choice. If ``queue_timeout_s`` bounds its wait, it
gets what is left over, and has no share; once it has begun, it keeps its slot to the end, and has a
share only if it was preempted and is older than that, so that its stream goes on.

This module does not know how a step is filled.
"""

from __future__ import annotations

import math
from typing import Final

from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import ORDER, Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["GuaranteedShare"]

# most seconds of earning that can be saved up, and the debt after which a request gives up its
# slot; if it would have to be computed again, it does so later, at the second at the latest
_SAVED: Final = 1.0
_OWED: Final = 5.0
# most debt, as seconds of earning; more is forgiven, so that the next request does not wait longer
_DEBT: Final = 20.0
# most seconds of earning that are paid in advance with time left over by others
_AHEAD: Final = 10.0
# tokens of a small chunk; enough for one can always be saved up
_TILE: Final = 16
# one in this many steps has no background rows
_LOOK: Final = 32
# seconds over which the part of ordinary work is taken
_LATELY: Final = 60.0
# least part of the engine that is assumed to be left over for work without a share
_LEAST_LEFT: Final = 0.01


class GuaranteedShare:
    """Counts the seconds that best effort has earned and spent. One per scheduler, called at every
    step that is paced."""

    def __init__(self, state: SchedulerState) -> None:
        config = state.config
        self._state, self._model = state, state.step_time
        self._share, self._timeout = config.best_effort_share, config.queue_timeout_s
        # the time that rows add to a step is limited only if steps are sized by their time
        self._meters = config.adaptive_token_budget
        # when the last planned step begins
        self._now = 0.0
        # seconds earned and not spent on slots or memory, and on the time of steps; below 0: spent
        # in advance
        self._places = self._time = 0.0
        self._last: Step | None = None
        # seconds of the engine for ordinary work, exponentially decayed, and their time
        self._ordinary_seconds = self._as_of = 0.0
        # number of steps since ordinary requests run without a pause
        self._steps_beside = 0

    def rest(self) -> None:
        """Reset earnings: the last request has ended."""
        self._places = self._time = 0.0
        self._last = None

    def has_share(self, request: Request) -> bool:
        """Whether a best-effort request may spend the seconds earned."""
        if request.asked.slo.best_effort or self._timeout is None:
            return True
        waited = self._now - request.asked.arrival_time
        return request.num_preemptions > 0 and waited >= self._timeout

    # ------------------------------------------------------------------ earned and spent

    def begin(self, view: RunningView, starts: float) -> None:
        """Settle the last step, before one that begins at ``starts`` is planned."""
        self._now = starts
        last, self._last = self._last, None
        waiting = self._state.waiting
        if last is not None:
            self._note_ordinary(view, last, starts)
        if not self._share or not (view.ordinary or len(waiting.ordinary)):
            # there is no ordinary work to take time from
            self._limit(-math.inf if view.best_effort else 0.0, 0.0)
            return
        if last is not None and last.rows and self._model.ready:
            self._settle(view, last)

    def _settle(self, view: RunningView, last: Step) -> None:
        """Count what best effort earned in the last step, and what its slots cost."""
        seconds = self._model.predict(last.shape)
        own = [request for request in view.best_effort if self.has_share(request)]
        if own or self._first() is not None:
            self._places += self._share * seconds
            self._time += self._share * seconds
        granted = [request for request in own if request.granted]
        self._places -= seconds * self._part(granted)
        if own and not self._background_is_here():
            # what others left over counts as paid
            part = self._part([request for request in own if not request.granted])
            time = 0.0
            if last.ordinary_seconds is not None:
                time = (seconds - last.ordinary_seconds) * len(own) / len(view.best_effort)
            free, least = max(seconds * part, time), -_AHEAD * self._share
            self._places = max(min(self._places, least), self._places - free)
            self._time = max(min(self._time, least), self._time - free)
        self._limit(-_DEBT * self._share, self._most(own))
        for request in granted:
            lost = min(self._state.running.seconds_lost(request), _OWED * self._share)
            request.granted = self.credit > -max(_SAVED * self._share, lost)
            request.keeps_slot = request.granted

    def _background_is_here(self) -> bool:
        """Whether background work needs its share every few seconds: unlike that of work with
        targets, its wait is bounded by nothing else."""
        state, tier = self._state, Tier.BACKGROUND
        waits = any(head.tier is tier for head in state.waiting.best_effort_heads())
        return waits or bool(state.running.most_tokens[tier])

    def _note_ordinary(self, view: RunningView, last: Step, starts: float) -> None:
        """Count the seconds that the last step spent on ordinary work."""
        self._ordinary_seconds *= math.exp(min(0.0, self._as_of - starts) / _LATELY)
        self._as_of = starts
        if last.rows and self._model.ready:
            seconds = self._model.predict(last.shape)
            time = seconds if last.ordinary_seconds is None else last.ordinary_seconds
            places = seconds * self._part(view.ordinary)
            self._ordinary_seconds += max(places, time * (not places))

    def left_over(self, request: Request, now: float) -> float:
        """Return the part of the engine that a best-effort or late request and its like get now."""
        state = self._state
        if not state.running.most_tokens[Tier.ORDINARY] and not len(state.waiting.ordinary):
            return 1.0
        lately = self._ordinary_seconds * math.exp(min(0.0, self._as_of - now) / _LATELY) / _LATELY
        least = self._share if self.has_share(request) else 0.0
        return max(least, _LEAST_LEFT, 1.0 - lately)

    def planned(self, step: Step) -> None:
        """Keep the step that is filled next, to settle it later."""
        self._last = step

    def charge(self, seconds: float) -> None:
        """Charge the seconds by which best-effort rows are predicted to lengthen a step."""
        self._time -= seconds

    @property
    def credit(self) -> float:
        """Seconds earned and not spent, of that which is scarcer: slots and memory, or time."""
        return min(self._places, self._time)

    def _limit(self, least: float, most: float) -> None:
        self._places = max(least, min(self._places, most))
        self._time = max(least, min(self._time, most))

    def _part(self, requests: list[Request]) -> float:
        """Return the part of the engine that running requests take from others, which wait for
        slots or memory."""
        state = self._state
        if not requests:
            return 0.0
        limit = state.config.max_num_seqs
        # all slots were taken, though a request may have ended with the last step
        if state.last.blocked_by is Reason.SLOTS or len(state.running.requests) >= limit:
            return len(requests) / limit
        if state.last.blocked_by is Reason.MEMORY:
            return sum(len(request.block_ids) for request in requests) / state.cache.num_blocks
        return 0.0

    def _most(self, own: list[Request]) -> float:
        """Return the most seconds to save up: enough for a small chunk, and for the longest row."""
        tile = self._model.predict(StepShape().plus(0, _TILE))
        keys = max((request.num_computed_tokens for request in own), default=0)
        return max(_SAVED * self._share, tile, self._model.row_seconds(keys))

    # ------------------------------------------------------------------ asked by steps

    def _first(self) -> Request | None:
        """Return the first by order alone of the requests that head the best-effort queues and have
        a share: no tier waits for ever behind another."""
        heads = filter(self.has_share, self._state.waiting.best_effort_heads())
        return min(heads, key=ORDER, default=None)

    def turn(self) -> Request | None:
        """Return the waiting request that gets the next free slot, ahead of ordinary ones; None: no
        such request waits, or the seconds earned are spent."""
        return self._first() if self.credit > 0.0 else None

    @property
    def is_saved_up(self) -> bool:
        """Whether no more can be earned, so that the request whose turn it is holds others up."""
        return self.credit >= _SAVED * self._share > 0.0

    def tokens(self, view: RunningView) -> int:
        """Return the prompt tokens to keep in the next step for the first running granted request,
        as far as they are paid for."""
        if self.credit <= 0.0 or not self._model.ready:
            return 0
        for request in view.best_effort:
            lacking = request.num_uncomputed_tokens
            if lacking > 1 and request.granted:
                base, predict = view.base, self._model.predict
                each = (predict(base.plus(0, _TILE)) - predict(base)) / _TILE
                return min(lacking, int(self.credit / max(each, 1e-9)))
        return 0

    def background_seconds(self, view: RunningView) -> float:
        """Return the predicted seconds of the next step above which background rows stay out of it:
        the time that they add always costs others, whatever targets these have."""
        if not self._meters or not view.ordinary or not self._model.ready:
            self._steps_beside = 0
            return math.inf
        self._steps_beside += 1
        if self._steps_beside % _LOOK == 1:
            # the time of steps without such rows is known only from steps without them
            return 0.0
        return self._model.predict(view.base) + max(0.0, self.credit)
