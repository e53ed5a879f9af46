"""Would one more make everybody's tokens late?

The TPOT guard of SCORPIO (arXiv 2505.23022), without its credits: requests are let in while a step
that computes one token for each of those running, and for the newcomer, is predicted to take no
longer than the tightest TPOT among them. A target that not even a row alone can meet is past caring
for: nobody else waits for it.

This module does not know the queue.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

from paceline.core.pacing.view import Survey
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["PaceGuard", "least_target"]

# of the target, for steps that take longer than predicted
_SHARE: Final = 0.9


def least_target(model: StepTimeModel) -> float:
    """Seconds: a TPOT target below this cannot be met."""
    return model.predict(StepShape(0, 0.0, 1, 0)) / _SHARE


class PaceGuard:
    """Made for one step, of what runs. Best-effort requests count on neither side: they get rows
    as far as a step is not late for others."""

    def __init__(self, survey: Survey, model: StepTimeModel) -> None:
        self._model = model
        self._rows, self._keys = len(survey.ordinary), survey.narrow_keys
        self._tightest = min(map(self._within_reach, survey.targets), default=math.inf)

    def add(self, request: Request) -> None:
        """It runs too."""
        self._rows += 1
        self._keys += request.num_computed_tokens
        self._tightest = min(self._tightest, self._within_reach(request.targets.tpot))

    def allows(self, request: Request) -> bool:
        """Whether ``request`` may join those running."""
        if request.best_effort or request.favoured or self._rows == 0 or not self._model.ready:
            return True
        tightest = min(self._tightest, self._within_reach(request.targets.tpot))
        if tightest == math.inf:
            return True
        shape = StepShape(0, 0.0, self._rows + 1, self._keys + request.num_tokens)
        return self._model.predict(shape) <= _SHARE * tightest

    def _within_reach(self, tpot: float | None) -> float:
        """A target, unless there is none or nobody could meet it."""
        if tpot is None:
            return math.inf
        return tpot if tpot >= self._least else math.inf

    @cached_property
    def _least(self) -> float:
        return least_target(self._model)
