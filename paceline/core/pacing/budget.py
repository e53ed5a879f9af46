"""How many tokens a step may compute while requests have targets, and how long it may take.

With ``adaptive_token_budget`` it is the least of these, and else ``max_num_batched_tokens``:

* the chunk that is best for throughput (``predict.chunk``);
* *slack*: the next token of a request with a TPOT target is due at a known time, so a step may take
  until the earliest of these, and no longer (the dynamic chunk of Niyama, arXiv 2503.22562).
  Requests that are ahead of their schedule thereby lend their time to prompts that wait;
* short steps where all that runs is best effort, so that a new request is served soon (as long as
  keeps the pace of those that are late, if there are any), and while tenants that are kept apart
  share the engine.

This module does not know the queue, memory or the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline.core.config import SchedulerConfig
from paceline.core.pacing.view import RunningView
from paceline.core.predict.chunk import LATE_QUANTILE, ChunkSize
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["PACE_SHARE", "Allowance", "StepBudget", "least_target"]

# requests are paced to this share of their TPOT target: what is aimed at is missed half of the time
PACE_SHARE: Final = 0.9
# a request that would have to go so much faster than its target to catch up is past saving
_HOPELESS: Final = 0.5
# quantile of predicted lengths, for the time there is to catch up: rather too short than too long
_LEFT_QUANTILE: Final = 0.25
# times what the rows alone take: the longest step while tenants share the engine
_SHARED_ROWS: Final = 3.0


def least_target(model: StepTimeModel) -> float:
    """Seconds: a TPOT target below this cannot be met."""
    return model.predict(StepShape(0, 0.0, 1, 0)) / PACE_SHARE


class Allowance(NamedTuple):
    """What one step may spend."""

    # at least one for each running request and one more
    tokens: int
    # predicted seconds the step may take; best-effort rows stay out of a step beyond it
    seconds: float


class StepBudget:
    """Asked once a step, before anything is planned.

    Args:
        work: how many tokens requests are predicted to have.
    """

    def __init__(
        self, model: StepTimeModel, chunk: ChunkSize, work: WorkEstimator, config: SchedulerConfig
    ) -> None:
        self._model = model
        self._chunk = chunk
        self._work = work
        self._adaptive = config.adaptive_token_budget
        self._most = config.max_num_batched_tokens
        # seconds of a step in which all that runs is best effort
        self._best_effort_step_s = config.best_effort_step_s if self._adaptive else math.inf

    @property
    def best_effort_seconds(self) -> float:
        """The longest that best effort may make a step by itself: as configured. Where a single
        row, or the fixed part of a step with prompts, takes so long already, a new request waits
        for that in any case, and twice as long lets others share it."""
        row = self._model.predict(StepShape(0, 0.0, 1, 0))
        return max(self._best_effort_step_s, 2.0 * max(row, self._chunk.tile_seconds()[0]))

    def added_seconds(self, view: RunningView) -> float:
        """The longest that best effort may make the next step: longer where it is alone and late
        chats are in it, but not than their pace allows."""
        seconds = self.best_effort_seconds
        if view.ordinary:
            return seconds
        paces = [r.targets.tpot for r in view.best_effort if r.targets.tpot is not None]
        return max(seconds, PACE_SHARE * min(paces, default=0.0))

    @property
    def full_step_seconds(self) -> float:
        """Of the longest step in which all is best effort."""
        tokens = self._chunk.knee() if self._adaptive else self._most
        longest = self._model.predict(StepShape().plus(0, max(2, tokens)))
        return min(longest, self.best_effort_seconds)

    def allow(self, view: RunningView, now: float) -> Allowance:
        """What the next step may spend."""
        chunk, num_running = self._chunk, view.num_running
        if not self._adaptive:
            return Allowance(self._most, math.inf)
        gap = min(view.gap, chunk.gap) if view.narrow_rows else math.inf
        if not self._model.ready:
            return Allowance(chunk.untrained(num_running, careful=gap < math.inf), math.inf)
        start = max((request.num_computed_tokens for request in view.wide), default=0)
        if tokens := view.favoured:
            # requests of other tenants have had more than their share
            if gap < math.inf:
                tokens = min(tokens, chunk.within(view.base, start, self._most, gap=gap))
            return Allowance(chunk.total(tokens, num_running), 0.0)
        if num_running and not view.ordinary:
            allowed = self.added_seconds(view)
        else:
            allowed = min(self._least_spare(view.paced, now), gap)
            allowed /= max(1.0, self._model.quantile(LATE_QUANTILE))
            if view.shared:
                allowed = min(allowed, self._shared_seconds(view))
        if allowed == math.inf:
            tokens = chunk.unpaced(num_running, view.narrow_rows)
        else:
            tokens = chunk.within(view.base, start, chunk.knee(), seconds=allowed, gap=gap)
        # a prompt with a target is not kept waiting for best-effort rows
        return Allowance(chunk.total(tokens, num_running), 0.0 if view.urgent else allowed)

    def _shared_seconds(self, view: RunningView) -> float:
        """Of a step while tenants that are kept apart share the engine: no longer than one in which
        all is best effort, for a new request of another tenant waits for its end; but where many
        rows run, most of it is for prompts still, or their tokens would cost too much."""
        return max(self.best_effort_seconds, _SHARED_ROWS * self._model.predict(view.base))

    def _least_spare(self, paced: Sequence[Request], now: float) -> float:
        """Seconds the next step may take for all paced requests: until the next token of each is
        due, or, for one that is behind, a share of the time until its last one is, so that it
        catches up while it lasts and not at once. One that cannot catch up has missed: it is kept
        at its pace, and others need not miss for it."""
        least = math.inf
        # requests that came last are hardly ahead of their schedule: few others have less time
        for request in reversed(paced):
            tpot, first_token = request.targets.tpot, request.first_token_time
            assert tpot is not None and first_token is not None, "it is paced"
            pace = PACE_SHARE * tpot
            done = request.num_tokens - request.num_prompt_tokens + request.num_pending_tokens
            spare = first_token + done * pace - now
            if spare >= least:
                continue
            if spare < pace:
                left = max(1, self._work.output_tokens(request, _LEFT_QUANTILE) - done)
                catching_up = (first_token + (done + left - 1) * pace - now) / left
                spare = pace if catching_up < _HOPELESS * pace else max(spare, catching_up)
            least = min(least, spare)
        return least

    def seconds_per_token(self, view: RunningView) -> float:
        """What a prompt token takes while these run, all of them being on time."""
        chunk, base, num_running = self._chunk, view.base, view.num_running
        if not self._adaptive:
            tokens = max(2, self._most - num_running)
        else:
            tokens = chunk.beside(num_running, view.narrow_rows)
            if view.paces:
                pace = PACE_SHARE * min(view.paces)
                tokens = max(chunk.floor, chunk.within(base, 0, chunk.knee(), seconds=pace))
        return self._model.predict(base.plus(0, max(2, tokens))) / tokens
