"""Seconds that a step will take, by its contents: fitted online, used by all predictions.

The model is linear in six features (DistServe's, OSDI'24, with the terms of mixed batches), and in
two of adapters::

    t = a0 + a1*T + a2*SUM_wide n*(s + n/2) + a3*R + a4*SUM_narrow s + a5*[T > 0] + a6*B + a7*P

A row is *narrow* when it computes one token and *wide* otherwise; T counts the tokens of wide
rows, R the narrow rows, s the tokens before a row, n the tokens in it; B the bytes of the step's
adapters, P the products of their rows with them. All coefficients are kept
at 0 or more, so that more work never predicts less time.

This module does not know requests, the clock, or its callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter, mul
from typing import Final, NamedTuple

from paceline.core.outputs import ScheduledRow
from paceline.core.predict.memory_bound import Hinge

__all__ = ["NO_ADAPTERS", "AdapterWork", "StepShape", "StepTimeModel"]

# brings every feature to about 1 in a busy step, so that one ridge term suits all
_SCALES: Final = (1.0, 1e-3, 1e-6, 1e-2, 1e-5, 1.0, 1e-8, 1e-8)
_SIZE: Final = len(_SCALES)
_RIDGE: Final = 1e-9
_SWEEPS: Final = 12
_LATER_SWEEPS: Final = 4
# observations between two fits once there are many
_REFIT: Final = 32
_WINDOW: Final = 256
# A machine slows down for all kinds of work at once: the mean of the last 20 or so steps' actual
# over fitted time, each at most _STALL, corrects the fit from _DRIFT on. A ratio that stays above
# _LASTING after a new fit rescales all earlier observations.
_FOLLOW: Final = 0.05
_STALL: Final = 4.0
_DRIFT: Final = 0.05
_LASTING: Final = 0.2
# the feature of (index, feature)
_VALUE: Final = itemgetter(1)


class StepShape(NamedTuple):
    """Features that a step's time depends on; add rows one by one, or take a whole plan's."""

    # tokens of wide rows
    wide_tokens: int = 0
    # keys that wide rows attend to, summed over their tokens
    wide_keys: float = 0.0
    narrow_rows: int = 0
    # keys that narrow rows attend to
    narrow_keys: int = 0

    def plus(self, start: int, num_tokens: int) -> StepShape:
        """Return this step with one more row."""
        if num_tokens == 1:
            rows, keys = self.narrow_rows + 1, self.narrow_keys + start
            return StepShape(self.wide_tokens, self.wide_keys, rows, keys)
        pairs = self.wide_keys + num_tokens * (start + num_tokens / 2)
        return StepShape(self.wide_tokens + num_tokens, pairs, self.narrow_rows, self.narrow_keys)

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> StepShape:
        shape = cls()
        for _, start, num_tokens, _, _ in rows:
            shape = shape.plus(start, num_tokens)
        return shape

    def features(self, adapters: AdapterWork) -> tuple[float, ...]:
        any_wide = 1.0 if self.wide_tokens > 0 else 0.0
        return tuple(map(mul, (1.0, *self, any_wide, *adapters), _SCALES))


class AdapterWork(NamedTuple):
    """Work of a step's adapters beyond its shape."""

    # bytes of distinct adapters
    num_bytes: float = 0.0
    # products of the rows that use them
    num_products: float = 0.0


NO_ADAPTERS: Final = AdapterWork()


class StepTimeModel:
    """Non-negative least squares, weighted by 1 / seconds^2 so that relative errors count.

    Args:
        forgetting: weight kept by an observation at each later one; 0.995 remembers ~200 steps.
        min_observations: below this ``ready`` is False and predictions must not be used.
    """

    def __init__(self, *, forgetting: float = 0.995, min_observations: int = 16) -> None:
        self._forgetting, self._min_observations = forgetting, min_observations
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        # weight of the newest observation, before the division by its seconds
        self._growth = 1.0
        self._weights = [0.0] * _SIZE
        # present seconds of the machine, in seconds of the fit
        self._scale = 1.0
        # recent ratio of actual to fitted time, and the part of it that corrects predictions
        self._pace = self._drift = 1.0
        # corrected weights for unscaled features
        self._rates = [0.0] * _SIZE
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._sorted_ratios: list[float] = []
        self._hinge = Hinge(_SIZE)
        # seconds of the adapters that steps are planned with, part of every prediction
        self._adapter_seconds = 0.0
        # tokens of wide rows in the largest step that was measured
        self.most_wide_tokens = 0
        self.num_observations = 0
        # whether there are enough observations to predict
        self.ready = min_observations <= 0
        # up to this number of tokens in a step cost almost nothing in addition to the rows that it
        # has anyway; 0 if no such size was found (``memory_bound``). Predictions do not use it
        self.free_tokens = 0

    def predict(self, shape: StepShape) -> float:
        """Return the expected seconds; 0.0 before the first observation."""
        constant, per_token, per_key, per_row, per_narrow_key, any_wide, *_ = self._rates
        wide_tokens, wide_keys, narrow_rows, narrow_keys = shape
        seconds = constant + per_row * narrow_rows + per_narrow_key * narrow_keys
        if wide_tokens > 0:
            seconds += any_wide + per_token * wide_tokens + per_key * wide_keys
        return seconds + self._adapter_seconds

    def expect_adapters(self, work: AdapterWork) -> None:
        """Predict steps with such adapters from now on."""
        self._adapter_seconds = sum(map(mul, work, self._rates[6:]))

    @property
    def wide_seconds(self) -> float:
        """Seconds that a step takes longer for having any wide row, however few its tokens."""
        return self._rates[5]

    def row_seconds(self, start: int) -> float:
        """Return the seconds that one more row of one token adds to a step."""
        return self._rates[3] + self._rates[4] * start

    def quantile(self, q: float) -> float:
        """Return the q-quantile of recent actual / predicted times; 1.0 when none are known."""
        ratios = self._sorted_ratios or [1.0]
        return ratios[min(int(q * len(ratios)), len(ratios) - 1)]

    def observe(
        self, shape: StepShape, seconds: float, adapters: AdapterWork = NO_ADAPTERS
    ) -> float:
        """Learn from one measured step. Returns the seconds that had been predicted for it."""
        features, expected = shape.features(adapters), self._adapter_seconds
        if adapters is NO_ADAPTERS:
            self._adapter_seconds = 0.0
        else:
            self.expect_adapters(adapters)
        predicted, self._adapter_seconds = self.predict(shape), expected
        if self.ready and predicted > 0.0:
            self._ratios.append(seconds / predicted)
            if self.num_observations >= 64:
                ratio = min(seconds / predicted * self._drift, _STALL)
                self._pace += _FOLLOW * (ratio - self._pace)
                self._drift = self._pace if abs(self._pace - 1.0) > _DRIFT else 1.0
        seconds /= self._scale
        # instead of making old observations lighter, make each heavier than the one before: most
        # features of most steps are zero, and zeros need no work then
        self._growth /= self._forgetting
        weight = self._growth / max(seconds, 1e-6) ** 2
        present = list(filter(_VALUE, enumerate(features)))
        for i, x_i in present:
            share = weight * x_i
            self._moment[i] += share * seconds
            row = self._gram[i]
            for j, x_j in present:
                row[j] += share * x_j
        self._hinge.observe(present, weight, shape.wide_tokens + shape.narrow_rows, seconds)
        self.num_observations += 1
        self.ready = self.num_observations >= self._min_observations
        is_new = shape.wide_tokens > self.most_wide_tokens
        self.most_wide_tokens = max(self.most_wide_tokens, shape.wide_tokens)
        if self.num_observations <= 64 or is_new or self.num_observations % _REFIT == 0:
            self._fit(features)
            self._sorted_ratios = sorted(self._ratios)
        factor = self._scale * self._drift
        self._rates = [factor * w * s for w, s in zip(self._weights, _SCALES, strict=True)]
        self._hinge.look(self.num_observations, self._gram, self._moment)
        self.free_tokens = self._hinge.free_tokens
        return predicted

    def _fit(self, features: Sequence[float]) -> None:
        """Reset the newest observation's weight to 1, before numbers overflow, and fit."""
        shrink = 1.0 / self._growth
        self._gram = [[g * shrink for g in row] for row in self._gram]
        self._moment = [m * shrink for m in self._moment]
        self._hinge.rescale(shrink)
        self._growth, before, self._weights = 1.0, self._weights, self._weights.copy()
        self._solve()
        left = self._pace * sum(map(mul, features, before))
        left /= max(sum(map(mul, features, self._weights)), 1e-12)
        scale = self._scale * self._pace
        if (self._pace > 1.0) == (left > 1.0) and (
            min(abs(self._pace - 1.0), abs(left - 1.0)) > _LASTING and 0.01 < scale < 100.0
        ):
            # no other mix of work explains it
            self._weights, self._scale, self._pace, self._drift = before, scale, 1.0, 1.0

    def _solve(self) -> None:
        """Run coordinate descent from the last solution: it moves slowly, few sweeps suffice."""
        weights, gram, moment = self._weights, self._gram, self._moment
        ridge = _RIDGE * gram[0][0]
        for _ in range(_SWEEPS if self.num_observations <= 64 else _LATER_SWEEPS):
            for i in range(_SIZE):
                row = gram[i]
                diagonal = row[i] + ridge
                if diagonal > 0.0:
                    lacking = moment[i] - sum(map(mul, row, weights))
                    weights[i] = max(0.0, weights[i] + lacking / diagonal)
