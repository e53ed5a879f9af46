"""What requests without targets pay for lengthening the steps of others.

Each step of other requests earns background rows a share of its own time, saved up to what a small
chunk takes, or the longest of their rows. So the others' mean time per token grows by that share at
most.

This module does not know the queue, memory or the clock.
"""

from __future__ import annotations

import math
from typing import Final

from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.tier import Tier

__all__ = ["BackgroundBucket"]

# one in so many steps is without background rows
_LOOK: Final = 32


class BackgroundBucket:
    """A token bucket whose tokens are seconds.

    Args:
        share: of a step's time, by which background rows may lengthen it; None: any.
        tile: tokens of a small chunk.
    """

    def __init__(self, model: StepTimeModel, share: float | None, tile: int) -> None:
        self._model = model
        self._share = share
        self._tile = tile
        # seconds that background rows may add to the next step
        self._saved = 0.0
        # since ordinary requests run without a pause
        self._steps_beside = 0

    def seconds(self, view: RunningView) -> float:
        """Predicted seconds of the next step beyond which background rows stay out of it."""
        share = self._share
        if share is None or not view.awaited or not self._model.ready:
            self._steps_beside = 0
            return math.inf
        self._steps_beside += 1
        if self._steps_beside % _LOOK == 1:
            # what a step takes without such rows is only known from steps without them
            return 0.0
        base = view.base
        own = self._model.predict(base)
        most = max(share * own, self._model.predict(base.plus(0, self._tile)) - own)
        saved = self._saved + share * own
        if saved > most:
            # or one with many keys could never be paid for
            rows = (r.num_computed_tokens for r in view.best_effort if r.tier is Tier.BACKGROUND)
            most = max(most, self._model.row_seconds(max(rows, default=0)))
        self._saved = min(saved, most)
        return own + max(0.0, self._saved)

    def charge(self, seconds: float) -> None:
        """Background rows are predicted to have made a step so much longer for others."""
        self._saved -= seconds
