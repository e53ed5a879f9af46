"""Check of whether one more running request would make the tokens of all late.

The TPOT guard of SCORPIO (arXiv 2505.23022), without its credits: requests are admitted while a
step that computes one token for each running request, and for the newcomer, is predicted to take no
longer than the tightest TPOT target among them. A target that even a single row cannot meet does
not count: no other request waits for it.

This module does not know the queue.
"""

from __future__ import annotations

import math

from paceline.core.pacing.budget import PACE_SHARE, least_target
from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request
from paceline.core.tier import Tier

__all__ = ["TpotGuard"]


class TpotGuard:
    """Guard of one step, made from the running requests. Best-effort requests are neither counted
    nor kept out: they get rows only as far as the step is not late for others."""

    def __init__(self, view: RunningView, model: StepTimeModel) -> None:
        self._model = model
        self._rows, self._keys = len(view.ordinary), view.narrow_keys
        self._least = least_target(model)
        self._tightest = min(map(self._within_reach, view.targets), default=math.inf)

    def add(self, request: Request) -> None:
        """Count a request that was admitted."""
        self._rows += 1
        self._keys += request.num_computed_tokens
        self._tightest = min(self._tightest, self._within_reach(request.targets.tpot))

    def allows(self, request: Request) -> bool:
        """Whether ``request`` may join those running."""
        if request.tier is not Tier.ORDINARY or request.boosted or not self._rows:
            return True
        tightest = min(self._tightest, self._within_reach(request.targets.tpot))
        if tightest == math.inf or not self._model.ready:
            return True
        shape = StepShape(0, 0.0, self._rows + 1, self._keys + request.num_tokens)
        return self._model.predict(shape) <= PACE_SHARE * tightest

    def _within_reach(self, tpot: float | None) -> float:
        """Return a target; infinity if there is none or no request could meet it."""
        return tpot if tpot is not None and tpot >= self._least else math.inf
