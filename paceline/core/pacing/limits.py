"""Limits of a step while requests have targets, or tenants are kept apart.

Ordinary requests are served first. Best effort gets what they leave of the step's time: a row or
chunk is added only while the step is predicted to stay within the seconds that the targets of
others leave. For rows beyond that, and for a slot or tokens before others, it pays from its
guaranteed share (``share``), so it never stops altogether. Best effort without targets pays for
every row in a step with other requests.

This module does not know how the seconds are found, nor which requests are late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.budget import TpotGuard
from paceline.core.pacing.feasibility import Feasibility, Others
from paceline.core.pacing.share import GuaranteedShare
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import ORDER, Request
from paceline.core.step.limits import Step
from paceline.core.tier import Move, Tier

__all__ = ["PacedStep"]

# factor on the limit of a step's seconds, so that rounding errors keep out no row that is paid for
_ROUNDING: Final = 1.001
# tokens of which the chunks of best-effort requests are multiples
_TILE: Final = 16
# most requests that one step demotes as late, as the step waits for that
_MAX_DEMOTED: Final = 64


@dataclass(slots=True, eq=False, kw_only=True)
class PacedStep(Step):
    """A step with limits for targets, made by ``Paced``."""

    model: StepTimeModel
    feasibility: Feasibility
    share: GuaranteedShare
    # None: the pace of running requests keeps no request out
    guard: TpotGuard | None
    # predicted seconds by which best effort may lengthen the rows of others
    added_seconds: float
    # the ordinary requests in the step that a late one may be demoted for
    others: Others
    # the request for which others were preempted
    displaced_for: Request | None
    # requests that this step demoted as late
    _num_demoted: int = 0
    # at most one waiting request that is tried, and a running one computed, at others' expense
    _turn: Request | None = None
    _paying: Request | None = None
    # predicted seconds of the step, and its number of rows then
    _predicted: float = 0.0
    _predicted_at: int = -1
    # seconds that best effort has added to the step, in its first pass or by admission
    _best_effort_cost: float = 0.0

    def next(self, last: Tier, passed: Sequence[Request]) -> Request | Reason | None:
        state = self.state
        request = self._first(last, passed)
        if request is None:
            return None
        if self.budget <= 0:
            return Reason.BUDGET
        if self._num_demoted >= _MAX_DEMOTED and last is Tier.ORDINARY:
            # a step without ordinary rows serves the requests that it just demoted
            return Reason.BUDGET if self.rows else None
        running = state.running.requests
        free = state.config.max_num_seqs - len(running)
        if free <= 0:
            return Reason.SLOTS
        if request.tier is Tier.ORDINARY or not running:
            return request
        if request.tier is Tier.DEMOTED and self._yields(request, free):
            return Reason.POLICY
        if state.valve.level >= Pressure.HOLD_BEST_EFFORT:
            return Reason.PRESSURE
        has_room = request is self._turn or self._has_room(request, math.inf)
        return request if has_room else Reason.BUDGET

    def _first(self, last: Tier, passed: Sequence[Request]) -> Request | None:
        """Return the first request of the pass. In the ordinary one it may be a best-effort request
        that has earned the next slot, but not before a request for which others were preempted."""
        waiting = self.state.waiting
        if last is Tier.ORDINARY and not passed:
            self._let_rejoin()
        if last is not Tier.ORDINARY:
            patient = waiting.peek_best_effort(pressing=self.pressing)
            return None if patient is None or patient.tier > last else patient
        head = waiting.ordinary.peek()
        if (
            self._turn is None
            and (head is None or head is not self.displaced_for)
            and self.state.valve.level < Pressure.HOLD_BEST_EFFORT
            and (turn := self.share.turn()) is not None
            # it need not pay if the step has room for it and no ordinary request waits
            and (head is not None or not self._has_room(turn, math.inf))
        ):
            self._turn = turn
            return turn
        return head

    def stands_aside(self, request: Request, last: Tier) -> bool:
        return request.tier > last and not (request is self._turn and self.share.is_saved_up)

    def _let_rejoin(self) -> None:
        """Make a late request ordinary again, in its order among requests without targets, once it
        endangers no target and a slot is free."""
        state, waiting = self.state, self.state.waiting
        if self.budget <= 0 or len(state.running.requests) >= state.config.max_num_seqs:
            return
        head = waiting.ordinary.peek()
        if not (self.others.without_ttft_target if head is None else head.slo.ttft is None):
            return
        # one at a time, and in order
        demoted = (*waiting.late, *filter(None, (waiting.demoted.peek(),)))
        late = min(demoted, key=ORDER, default=None)
        if late is None or late.asked.slo.best_effort or (head and head.order < late.order):
            return
        if not self.feasibility.endangers(late, self.now, self.others):
            waiting.move(late, lambda request: request.move(Move.REJOIN))

    def demotes(self, request: Request, passed: Sequence[Request]) -> bool:
        late = self.feasibility.is_late(request, self.now)
        if not late or not self.feasibility.endangers(request, self.now, self.others, passed):
            return False
        self.feasibility.demote(request)
        self._num_demoted += 1
        return True

    def obstacle(self, request: Request) -> Reason | None:
        return None if self.guard is None or self.guard.allows(request) else Reason.PACE

    def admitted(self, request: Request) -> None:
        if request.tier is not Tier.ORDINARY:
            request.granted = request is self._turn
            request.keeps_slot = request.granted or not self.share.has_share(request)
            return
        if self.guard is not None:
            self.guard.add(request)
        if request.targets.ttft is None:
            return
        if not self.feasibility.is_late(request, self.now):
            self.others = self.others._replace(urgent=True)
        if self.model.ready and self.state.config.adaptive_token_budget:
            # its prompt must not wait for best-effort rows, like those of running requests
            self.seconds = 0.0

    def _yields(self, late: Request, free: int) -> bool:
        """Whether it leaves the ``free`` slots to newcomers: fewer than the root of the slots that
        ordinary work takes, which vary by so many (square-root staffing)."""
        slots, left_over = self.state.config.max_num_seqs, self.share.left_over(late, self.now)
        return free < round(math.sqrt(slots * (1.0 - left_over))) and not self.share.has_share(late)

    def _limit(self, request: Request) -> float:
        """Return the predicted seconds of the step above which a best-effort request stays out."""
        background = request.tier is Tier.BACKGROUND
        return min(self.background_seconds, self.seconds) if background else self.seconds

    def _is_metered(self, request: Request) -> bool:
        """Whether the request pays for all that it adds to a step."""
        return request.tier is Tier.BACKGROUND and self.background_seconds < math.inf

    def _most_seconds(self) -> float:
        """Return the predicted seconds that the step may take with best effort added to its rows;
        limited because the next request to arrive waits for its end."""
        if not self.model.ready:
            return math.inf
        own = self.model.predict(self.shape) - self._best_effort_cost if self.rows else 0.0
        return own + self.added_seconds

    def _has_room(self, request: Request, most: float) -> bool:
        """Whether the step has time, ``most`` seconds at most, for the request's first tile."""
        limit = min(most, self._limit(request))
        if limit == math.inf or not self.rows:
            return True
        return self.model.predict(self.shape.plus(0, _TILE)) <= limit

    def chunk(self, request: Request, *, admission: bool) -> int:
        limit, start = self._limit(request), request.num_computed_tokens
        if admission:
            limit = min(limit, self._most_seconds())
        if limit == math.inf:
            return max(1, self.budget)
        if request in (self._turn, self._paying):
            limit = max(limit, self.model.predict(self.shape) + self.share.credit)
        sizes = range(1, max(1, self.budget // _TILE) + 1)
        shape, predict = self.shape, self.model.predict
        fitting = bisect_right(sizes, limit, key=lambda n: predict(shape.plus(start, n * _TILE)))
        return max(1, fitting) * _TILE

    def takes(self, request: Request) -> bool:
        """Whether the step has time for the row, or the share of best effort pays for it."""
        limit = self._limit(request)
        if limit == math.inf or not self.rows:
            return True
        if self._predicted_at != len(self.rows):
            self._predicted_at = len(self.rows)
            self._predicted = self.model.predict(self.shape)
        row = self.model.row_seconds(request.num_computed_tokens)
        if self._predicted + row > _ROUNDING * limit:
            # a granted request pays for its slot anyway, and may use it
            pays = self.share.credit >= row or request.granted
            is_look = self._is_metered(request) and not self.background_seconds
            if is_look or not pays or not self.share.has_share(request):
                return False
            if request.num_uncomputed_tokens > 1:
                self._paying = request
            elif not self._is_metered(request):
                self.share.charge(row)
        # this one has its row when the next one asks
        self._predicted += row
        self._predicted_at += 1
        return True

    def add(self, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        before = self.shape
        Step.add(self, request, num_tokens, new_block_ids)
        if num_tokens > 1:
            self._predicted_at = -1  # ``takes`` has counted a row of one token
        if self._is_metered(request) or request in (self._turn, self._paying):
            self.share.charge(self._seconds_since(before))

    def _seconds_since(self, before: StepShape) -> float:
        """Return the predicted seconds that were added to the step since it had this shape."""
        return self.model.predict(self.shape) - self.model.predict(before)

    def lengthened(self, before: StepShape) -> None:
        self._best_effort_cost += self._seconds_since(before)

    def first_pass_done(self, num_must_run: int) -> None:
        if len(self.rows) > num_must_run:
            self.ordinary_seconds = self.model.predict(self.shape) - self._best_effort_cost
        self.seconds = min(self.seconds, self._most_seconds())
