"""How many tokens the next step may compute.

``FixedTokenBudget`` always says ``max_num_batched_tokens``. ``AdaptiveTokenBudget`` asks the
step-time model:

* The knee: steps are made no larger than it takes for the fixed part of a step's time to be a small
  share. Beyond that a larger step computes no more tokens a second, and every token in it, and
  every request that arrives meanwhile, waits for its end. While tenants that are kept apart share
  the engine, the share is larger and steps are shorter.
* What is free: where a step takes as long as reading the weights (``hinge``), the chunk beside rows
  that nobody paces is as large as hides behind that, and prompts keep up with streams.
* The slack of those running (the dynamic chunk of Niyama, arXiv 2503.22562): the next token of a
  paced request is due at a known time, so a step may take until the earliest of these, and no
  longer. Requests that are ahead of their schedule thereby lend their time to prompts that wait.
* Best-effort work that runs alone is cut into short steps, so that whoever arrives is served soon.
* Work that nobody waits for (best effort, no targets) pays for the time by which it lengthens the
  steps of others: each of their steps earns it a share of its own time, saved up to what a small
  chunk takes, or the longest of its rows. So the others' mean time per token grows by that share at
  most.

This module does not know the queue, memory or the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.core.pacing.view import Survey
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.request import Request
from paceline.core.tier import Tier

__all__ = ["PACE_SHARE", "AdaptiveTokenBudget", "Allowance", "FixedTokenBudget", "TokenBudget"]


# requests are paced to this share of their TPOT target: what is aimed at is missed half of the time
PACE_SHARE = 0.9
# a request that would have to go so much faster than its target to catch up is past saving
_HOPELESS = 0.5
# of predicted lengths, for the time there is to catch up: rather too short than too long
_LEFT_QUANTILE = 0.25
# times what the rows alone take: the longest step while tenants share the engine
_SHARED_ROWS = 3.0
# tokens of a step before anything was measured
_UNTRAINED = 512
# one in so many steps is without background rows
_LOOK = 32
# share of the chunk by which prompts would be computed as fast as streams end: they end unevenly
_EVEN = 0.7
# of so many chunks that are to hide behind rows, one is twice as large and one half
_AROUND = 24
# observations between two looks at where the knee is
_REFIT = 16


class Allowance(NamedTuple):
    """What one step may spend."""

    # at least one for each running request and one more
    tokens: int
    # predicted seconds the step may take; best-effort rows stay out of a step beyond it
    seconds: float = math.inf
    # the same for rows that nobody waits for
    background: float = math.inf


class TokenBudget(Protocol):
    """Asked once a step, before anything is planned."""

    @property
    def best_effort_seconds(self) -> float:
        """Of a step in which all is best effort."""
        ...

    @property
    def full_step_seconds(self) -> float:
        """Of the longest step in which all is best effort."""
        ...

    def allow(self, running: Survey, now: float) -> Allowance:
        """What the next step may spend."""
        ...

    def charge(self, seconds: float) -> None:
        """Background rows are predicted to have made the step so much longer for others."""
        ...

    def seconds_per_token(self, running: Survey) -> float:
        """What a prompt token takes while these run, all of them being on time."""
        ...


class FixedTokenBudget:
    """The same every step."""

    @property
    def best_effort_seconds(self) -> float:
        return math.inf

    @property
    def full_step_seconds(self) -> float:
        return self._model.predict(StepShape().plus(0, max(2, self._allowance.tokens)))

    def __init__(self, model: StepTimeModel, max_num_batched_tokens: int) -> None:
        self._model = model
        self._allowance = Allowance(max_num_batched_tokens)

    def allow(self, running: Survey, now: float) -> Allowance:
        return self._allowance

    def charge(self, seconds: float) -> None:
        """It limits nothing."""

    def seconds_per_token(self, running: Survey) -> float:
        tokens = max(2, self._allowance.tokens - running.num_running)
        return self._model.predict(running.base.plus(0, tokens)) / tokens


class AdaptiveTokenBudget:
    """See the module.

    Args:
        max_num_batched_tokens: never more than this.
        work: how many tokens requests are predicted to have.
        best_effort_step_s: seconds of a step in which all that runs is best effort.
        background_share: of a step's time, by which background rows may lengthen it; None: any.
        tile: chunks are multiples of it, where the matrix kernels are efficient.
        floor: a chunk of this size is allowed however late the running requests are, or new
            requests would starve.
        quantile: of actual / predicted time that must fit; 0.9 is late once in ten steps.
        overhead: share of the fixed part in the time of the largest step.
        shared_overhead: the same while tenants that are kept apart share the engine: whoever comes
            waits for the end of another's step.
    """

    def __init__(
        self,
        model: StepTimeModel,
        max_num_batched_tokens: int,
        *,
        work: WorkEstimator,
        best_effort_step_s: float,
        background_share: float | None = None,
        tile: int = 32,
        floor: int = 32,
        quantile: float = 0.9,
        overhead: float = 0.03,
        shared_overhead: float = 0.15,
    ) -> None:
        self._model = model
        self._most = max_num_batched_tokens
        self._work = work
        self._best_effort_step_s = best_effort_step_s
        self._background_share = background_share
        # seconds that background rows may add to the next step
        self._credit = 0.0
        # since ordinary requests run without a pause
        self._steps_beside = 0
        # of one tenant, and of several that are kept apart
        self._overheads = (overhead, shared_overhead)
        # whose chunk was to hide behind the rows beside it
        self._steps_beside_rows = 0
        self._known_at = -1
        self._tiles = [1, 1]
        self._tile = tile
        self._floor = floor
        self._quantile = quantile

    def allow(self, running: Survey, now: float) -> Allowance:
        allowance = self._allow(running, now)
        share = self._background_share
        if share is None or not running.awaited or not self._model.ready:
            self._steps_beside = 0
            return allowance
        self._steps_beside += 1
        if self._steps_beside % _LOOK == 1:
            # what a step takes without such rows is only known from steps without them
            return allowance._replace(background=0.0)
        base = running.base
        own = self._model.predict(base)
        most = max(share * own, self._model.predict(base.plus(0, self._tile)) - own)
        saved = self._credit + share * own
        if saved > most:
            # or one with many keys could never be paid for
            rows = (r.num_computed_tokens for r in running.best_effort if r.tier is Tier.BACKGROUND)
            most = max(most, self._model.row_seconds(max(rows, default=0)))
        self._credit = min(saved, most)
        return allowance._replace(background=own + max(0.0, self._credit))

    @property
    def best_effort_seconds(self) -> float:
        """As asked for; where a single row, or the fixed part of a step with prompts, takes so long
        already, whoever arrives waits for that whatever is done, and twice as long lets others
        share it."""
        row = self._model.predict(StepShape(0, 0.0, 1, 0))
        return max(self._best_effort_step_s, 2.0 * max(row, self._tiles_seconds()[0]))

    @property
    def full_step_seconds(self) -> float:
        longest = self._model.predict(StepShape().plus(0, max(2, self._knee(shared=False))))
        return min(longest, self.best_effort_seconds)

    def charge(self, seconds: float) -> None:
        self._credit -= seconds

    def _allow(self, running: Survey, now: float) -> Allowance:
        if not self._model.ready:
            return Allowance(min(self._most, max(_UNTRAINED, running.num_running + self._floor)))
        if running.favoured:
            # those in whose way it stands have had more than their share
            return Allowance(self._total(running.favoured, running), 0.0)
        spare = self._least_spare(running.paced, now)
        late = max(1.0, self._model.quantile(self._quantile))
        if running.num_running and not running.awaited:
            allowed = self.best_effort_seconds
        elif running.shared:
            allowed = min(self._shared_seconds(running), spare / late)
        elif spare == math.inf:
            # a prompt with a target is not kept waiting for best-effort rows
            allowed = 0.0 if running.urgent else math.inf
            return Allowance(self._total(self._patient(running), running), allowed)
        else:
            allowed = spare / late
        wide_start = max((request.num_computed_tokens for request in running.wide), default=0)
        tokens = self._total(self._within(running, wide_start, allowed), running)
        return Allowance(tokens, 0.0 if running.urgent else allowed)

    def _shared_seconds(self, running: Survey) -> float:
        """Of a step while tenants that are kept apart share the engine: no longer than one in which
        all is best effort, for whoever comes from another tenant waits for its end; but where many
        rows run, most of it is for prompts still, or their tokens would cost too much."""
        return max(self.best_effort_seconds, _SHARED_ROWS * self._model.predict(running.base))

    def _least_spare(self, paced: Sequence[Request], now: float) -> float:
        """The least ``_spare`` of all of these. Nobody's is less than the time until its next token
        is due, so few have to be asked of those who are in time: fewest if those that came last,
        who are not far ahead of their schedule yet, are looked at first."""
        least = math.inf
        for request in reversed(paced):
            tpot, first_token = request.targets.tpot, request.first_token_time
            assert tpot is not None and first_token is not None, "it is paced"
            done = request.num_tokens - request.num_prompt_tokens + request.num_pending_tokens
            if first_token + done * (PACE_SHARE * tpot) - now < least:
                least = min(least, self._spare(request, now))
        return least

    def _spare(self, request: Request, now: float) -> float:
        """Seconds the next step may take for a paced request: until its next token is due, or, for
        one that is behind, a share of the time until its last one is, so that it catches up while
        it lasts and not at once. One that cannot catch up has missed: it is kept at its pace, and
        others need not miss for it."""
        tpot, first_token = request.targets.tpot, request.first_token_time
        assert tpot is not None and first_token is not None, "it is paced"
        pace = PACE_SHARE * tpot
        num_output = request.num_tokens - request.num_prompt_tokens
        done = num_output + request.num_pending_tokens
        spare = first_token + done * pace - now
        if spare >= pace:
            return spare
        total = self._work.output_tokens(request, _LEFT_QUANTILE)
        left = max(1, total - done)
        catching_up = (first_token + (done + left - 1) * pace - now) / left
        if catching_up < _HOPELESS * pace:
            return pace
        return max(spare, catching_up)

    def seconds_per_token(self, running: Survey) -> float:
        base = running.base
        tokens = self._beside(running)
        if running.paced:
            tokens = max(self._floor, self._within(running, 0, PACE_SHARE * running.tightest))
        return self._model.predict(base.plus(0, max(2, tokens))) / tokens

    def _patient(self, running: Survey) -> int:
        """Tokens of the next chunk of prompt where nobody has a target."""
        tokens = self._beside(running)
        if not self._model.free_tokens or not running.narrow_rows:
            return tokens
        self._steps_beside_rows += 1
        # other sizes are tried now and then, or it would not be known any more
        turn = self._steps_beside_rows % _AROUND
        if turn == 0:
            tokens *= 2
        elif turn == _AROUND // 2:
            tokens //= 2
        return min(self._knee(shared=False), tokens)

    def _beside(self, running: Survey) -> int:
        """Tokens of a chunk as large as is best for throughput: as many as hide behind what the
        rows beside it take anyway, where that is known, and the knee otherwise. More where prompts
        come faster than that: those that wait in pieces keep others from streaming."""
        knee, free = self._knee(running.shared), self._model.free_tokens
        if running.shared or not free or not running.narrow_rows:
            return knee
        even = int(_EVEN * self._model.wide_per_narrow * running.narrow_rows)
        return min(knee, max(self._floor, free - running.num_running, even))

    def _knee(self, shared: bool) -> int:
        """Tokens of the smallest chunk of prompt whose fixed part is a small share of its time."""
        if self._known_at != self._model.num_observations // _REFIT:
            self._known_at = self._model.num_observations // _REFIT
            fixed, each = self._tiles_seconds()
            # fixed <= overhead * (fixed + each * tiles)
            most = max(1, self._most // self._tile)
            for index, overhead in enumerate(self._overheads):
                wanted = fixed * (1.0 / overhead - 1.0)
                enough = wanted < each * most
                self._tiles[index] = max(1, math.ceil(wanted / each)) if enough else most
        return min(self._most, self._tiles[shared] * self._tile)

    def _tiles_seconds(self) -> tuple[float, float]:
        """Of a step with prompts: what it takes whatever their size, and for each tile."""
        one, two = (self._model.predict(StepShape().plus(0, n * self._tile)) for n in (1, 2))
        return max(0.0, one - (two - one)), two - one

    def _within(self, running: Survey, wide_start: int, allowed: float) -> int:
        """Tokens of the largest chunk that is predicted to take ``allowed`` seconds at most."""
        tile, base = self._tile, running.base
        low, high = 0, self._knee(running.shared) // tile
        while low < high:
            middle = (low + high + 1) // 2
            if self._model.predict(base.plus(wide_start, middle * tile)) <= allowed:
                low = middle
            else:
                high = middle - 1
        return low * tile

    def _total(self, tokens: int, running: Survey) -> int:
        """A chunk of prompt and one token for each of those running."""
        return min(self._most, running.num_running + max(tokens, self._floor))
