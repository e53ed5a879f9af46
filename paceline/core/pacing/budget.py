"""Limits of a step while requests have targets: tokens to compute, predicted seconds, and requests.

With ``adaptive_token_budget`` the least of these applies, else ``max_num_batched_tokens``:

* the chunk that is best for throughput (``predict.chunk``);
* *slack*: the next token of a request with a TPOT target is due at a known time, so a step may last
  until the earliest of these times, and no longer (the dynamic chunk of Niyama, arXiv 2503.22562).
  So requests that are ahead of their schedule lend their time to waiting prompts. Where a step
  takes long for having any prompt at all, some steps have none, so that requests get ahead and the
  next chunk is larger;
* short steps while only best effort runs, so that a new request is served soon, and while tenants
  that are kept apart share the engine.

``TpotGuard`` says whether one more running request would make the tokens of all late.

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
from paceline.core.tier import Tier

__all__ = ["PACE_SHARE", "Allowance", "StepBudget", "TpotGuard", "least_target"]

# a share of the TPOT target: the pace of a request until it is ahead by one token's time, and what
# a step of rows alone may take, so that prompts have a part in it
PACE_SHARE: Final = 0.9
# a request that needs steps shorter than this share of its pace to catch up has missed its target
_HOPELESS: Final = 0.5
# quantile of predicted lengths, for the time left to catch up: low, as too long would be too late
_LEFT_QUANTILE: Final = 0.25
# the time that a step has for prompts is this many times what any prompt costs there, if at most so
# many steps without prompts save it up: what is lost is a fifth, and newcomers wait for them
_WORTHWHILE: Final = 5.0
_MOST_SAVED: Final = 8
# share of the rows' time below which that cost does not count, as a fit finds some where none is
_NOTABLE: Final = 0.1


def least_target(model: StepTimeModel) -> float:
    """Return the lowest TPOT target, s, that can be met."""
    return model.predict(StepShape(0, 0.0, 1, 0)) / PACE_SHARE


def _due(num_tokens: int, tpot: float) -> float:
    """Return the seconds after its first token at which a request is to have so many more: at
    ``PACE_SHARE`` of its target until it is ahead by one token's time, which late steps may take,
    and at the target from then on. To get ahead further would take time from prompts for nothing.
    """
    return tpot * max(PACE_SHARE * num_tokens, num_tokens - 1.0)


class Allowance(NamedTuple):
    """Limits of one step."""

    # at least one for each running request, plus one
    tokens: int
    # predicted seconds of the step above which best-effort rows stay out of it
    seconds: float
    # prompt tokens of the step for which this one, without prompts, saves time up; 0: it saves none
    saved_for: int = 0

    @property
    def wide(self) -> bool:
        """Return whether prompts have a part in it."""
        return not self.saved_for


class StepBudget:
    """Limits steps; called once a step, before anything is planned."""

    def __init__(
        self, model: StepTimeModel, chunk: ChunkSize, work: WorkEstimator, config: SchedulerConfig
    ) -> None:
        self._model, self._chunk, self._work = model, chunk, work
        self._adaptive, self._most = config.adaptive_token_budget, config.max_num_batched_tokens
        # longest time, s, of a step while only best effort runs
        self._best_effort_step_s = config.best_effort_step_s if self._adaptive else math.inf
        # steps without prompts since the last one with any, and their predicted seconds
        self._num_saved, self._saved_rows_s = 0, 0.0

    @property
    def best_effort_seconds(self) -> float:
        """Longest time, s, of a step of best effort alone: as configured. If a single row, or the
        fixed part of a step with prompts, takes that long already, a new request waits for that in
        any case, and twice that time lets other rows share it."""
        row = self._model.predict(StepShape(0, 0.0, 1, 0))
        return max(self._best_effort_step_s, 2.0 * max(row, self._chunk.tile_seconds()[0]))

    def added_seconds(self, view: RunningView) -> float:
        """Return the longest time, s, that best effort may add to the next step: more if it is
        alone and late requests stream in it, as far as their pace allows."""
        seconds = self.best_effort_seconds
        if view.ordinary:
            return seconds
        paces = [r.targets.tpot for r in view.best_effort if r.targets.tpot is not None]
        return max(seconds, PACE_SHARE * min(paces, default=0.0))

    @property
    def full_step_seconds(self) -> float:
        """Predicted time, s, of the longest step of best effort alone."""
        tokens = self._chunk.knee() if self._adaptive else self._most
        longest = self._model.predict(StepShape().plus(0, max(2, tokens)))
        return min(longest, self.best_effort_seconds)

    def allow(self, view: RunningView, now: float, lacking: int = 0) -> Allowance:
        """Return the limits of the next step. ``lacking``: tokens that the prompts of running
        requests and of the first waiting one lack."""
        chunk, num_running = self._chunk, view.num_running
        if not self._adaptive:
            return Allowance(self._most, math.inf)
        gap = min(view.gap, chunk.gap) if view.narrow_rows else math.inf
        if not self._model.ready:
            return Allowance(chunk.untrained(num_running, careful=gap < math.inf), math.inf)
        start = max((request.num_computed_tokens for request in view.wide), default=0)
        if tokens := view.boosted:
            # the pace of others does not count, as their tenants had more than their share
            self._num_saved, self._saved_rows_s = 0, 0.0
            if gap < math.inf:
                tokens = min(tokens, chunk.within(view.base, start, self._most, gap=gap))
            return Allowance(chunk.total(tokens, num_running), 0.0)
        late = max(1.0, self._model.quantile(LATE_QUANTILE))
        rows, longest = self._model.predict(view.base), gap / late
        if num_running and not view.ordinary:
            allowed = self.added_seconds(view)
        else:
            if view.step_rows < math.inf:
                # new requests of other tenants wait for its end, as for that of best effort alone;
                # with many rows it is longer, as prompts in a small part of it would cost too much
                longest = min(longest, max(self.best_effort_seconds, view.step_rows * rows))
            allowed = min(self._least_spare(view.paced, now, late), longest)
        if allowed == math.inf:
            tokens = chunk.unpaced(num_running, view.narrow_rows)
        else:
            tokens = chunk.within(view.base, start, chunk.knee(), seconds=allowed, gap=gap)
        saved_for = self._saves_for(view, allowed, lacking, start, longest) if lacking else 0
        self._num_saved = self._num_saved + 1 if saved_for else 0
        self._saved_rows_s = self._saved_rows_s + rows + chunk.away_s if saved_for else 0.0
        # a prompt with a target must not wait for best-effort rows
        seconds = 0.0 if view.urgent else allowed
        return Allowance(chunk.total(tokens, num_running), seconds, saved_for)

    def _saves_for(
        self, view: RunningView, allowed: float, lacking: int, start: int, longest: float
    ) -> int:
        """Return the chunk, worth its fixed cost, for which the next step saves time up: it
        computes no prompt, although it may take ``allowed`` s, and running requests that get ahead
        by it lend the time. 0: it computes prompts. No step may take more than ``longest`` s."""
        chunk, fixed = self._chunk, self._model.wide_seconds
        rows, most = self._model.predict(view.base), min(max(2, lacking), chunk.knee())
        if not view.paced or fixed <= _NOTABLE * rows:
            return 0
        wanted = min(rows + _WORTHWHILE * fixed, self._model.predict(view.base.plus(start, most)))
        wanted = min(wanted, longest)
        gain = PACE_SHARE * min(view.paces) - rows - chunk.away_s
        if not allowed < wanted <= allowed + gain * (_MOST_SAVED - self._num_saved):
            return 0
        tokens = chunk.within(view.base, start, chunk.knee(), seconds=wanted)
        return max(2, chunk.floor, tokens)

    def _least_spare(self, paced: Sequence[Request], now: float, late: float) -> float:
        """Return the seconds the next step may take for all paced requests: until the next token of
        each is due. A request that is behind gets an equal part of the time until its last token is
        due, to catch up over its whole output and not at once. One that cannot catch up has missed
        its target: it is served at its pace, and others need not miss theirs for it.

        What such a request did not take of steps without prompts is left to the next one with some.
        One step in ten takes more than ``late`` times as long as predicted. What counts is the mean
        of all until the last token, which varies less: by the root of their number."""
        least = math.inf
        tightest: Request | None = None
        # the newest requests are hardly ahead of their schedule, so few older ones have less time
        for request in reversed(paced):
            tpot, first_token = request.targets.tpot, request.first_token_time
            assert tpot is not None and first_token is not None, "it is paced"
            done = request.num_tokens - request.num_prompt_tokens + request.num_pending_tokens
            spare = first_token + _due(done, tpot) - now
            if spare >= least:
                continue
            pace = _due(done, tpot) - _due(done - 1, tpot)
            if spare < pace:
                left = max(1, self._work.output_tokens(request, _LEFT_QUANTILE) - done)
                catching_up = (first_token + _due(done + left - 1, tpot) - now) / left
                each = pace if catching_up < _HOPELESS * pace else catching_up
                spare = max(spare, each * (1 + self._num_saved) - self._saved_rows_s)
            if spare < least:
                least, tightest = spare, request
        if tightest is None or late == 1.0:
            return least
        done = tightest.num_output_tokens + tightest.num_pending_tokens
        left = max(1, self._work.output_tokens(tightest, _LEFT_QUANTILE) - done)
        return least / (1.0 + (late - 1.0) / math.sqrt(left))

    def seconds_per_token(self, view: RunningView) -> float:
        """Return the seconds per prompt token while these requests run, all of them on time."""
        chunk, base, num_running = self._chunk, view.base, view.num_running
        if not self._adaptive:
            tokens = max(2, self._most - num_running)
        else:
            tokens = chunk.beside(num_running, view.narrow_rows)
            if view.paces:
                pace = PACE_SHARE * min(view.paces)
                rows = self._model.predict(base)
                gain, fixed = pace - rows, self._model.wide_seconds
                worthwhile = _WORTHWHILE * fixed
                saves = fixed > _NOTABLE * rows and gain < worthwhile <= gain * _MOST_SAVED
                most = min(rows + worthwhile, view.gap, chunk.gap) if saves else pace
                tokens = max(chunk.floor, chunk.within(base, 0, chunk.knee(), seconds=most))
                if saves:
                    # steps without prompts save ``gain`` each
                    seconds = self._model.predict(base.plus(0, tokens)) - rows
                    return (pace * seconds / gain + chunk.away_s) / tokens
        return (self._model.predict(base.plus(0, max(2, tokens))) + chunk.away_s) / tokens


class TpotGuard:
    """The guard of SCORPIO (arXiv 2505.23022) for one step, without its credits: requests are
    admitted while a step that computes one token for each running request, and for the newcomer, is
    predicted to take no longer than the tightest TPOT target among them.

    The time of other engines on the same processors counts (``away_s``). Best-effort requests are
    neither counted nor kept out: they get rows only as far as the step is
    not late for others. A target that even a single row cannot meet does not count.
    """

    def __init__(self, view: RunningView, model: StepTimeModel, away_s: float = 0.0) -> None:
        self._model, self._away_s = model, away_s
        self._rows, self._keys = len(view.ordinary), view.narrow_keys
        self._least = least_target(model) + away_s / PACE_SHARE
        self._tightest = min(map(self._within_reach, view.targets), default=math.inf)

    def add(self, request: Request) -> None:
        """Count a request that was admitted."""
        self._rows += 1
        self._keys += request.num_computed_tokens
        self._tightest = min(self._tightest, self._within_reach(request.targets.tpot))

    def allows(self, request: Request) -> bool:
        """Return whether ``request`` may join the running ones."""
        if request.tier is not Tier.ORDINARY or request.boosted or not self._rows:
            return True
        tightest = min(self._tightest, self._within_reach(request.targets.tpot))
        if tightest == math.inf or not self._model.ready:
            return True
        shape = StepShape(0, 0.0, self._rows + 1, self._keys + request.num_tokens)
        return self._model.predict(shape) + self._away_s <= PACE_SHARE * tightest

    def _within_reach(self, tpot: float | None) -> float:
        """Return a target; infinity if there is none or no request could meet it."""
        return tpot if tpot is not None and tpot >= self._least else math.inf
