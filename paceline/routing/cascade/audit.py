"""Audit: the loss of requests that both models were asked, and what follows from it."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

__all__ = ["Audit"]

# audited requests that the observed loss is the mean of, and how many an alarm needs
_RECENT: Final = 400
_LEAST: Final = 20
# standard errors of a one-sided bound that is wrong once in 100 times
_SURE: Final = 2.33
# step of the threshold for a loss of 1
_STEP: Final = 0.05


class Audit:
    """Audited requests of one cascade.

    ``shift`` is added to the threshold where that may adapt. It grows with each loss, shrinks
    without, and never falls below 0, so drift only makes the cascade stricter. As nothing stays
    small at a threshold above 1, the mean loss of T audited requests is at most the bound plus
    (1 + step) / (step * T), whatever the traffic is (Gibbs and Candes, "Adaptive Conformal
    Inference").
    """

    def __init__(self) -> None:
        # losses, and the bounds that held then
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self.shift = 0.0

    @property
    def loss(self) -> float:
        """Mean loss of the latest audited requests; NaN without any."""
        return self._mean(0) if self._recent else math.nan

    def _mean(self, which: int) -> float:
        return sum(each[which] for each in self._recent) / len(self._recent)

    def add(self, loss: float, max_loss: float) -> None:
        """Take in a request's loss, 0 where the large model would have answered."""
        self._recent.append((loss, max_loss))
        self.shift = max(0.0, self.shift + _STEP * (loss - max_loss))

    @property
    def is_broken(self) -> bool:
        """Whether the loss exceeds the mean bound by more than chance: Wilson's lower limit
        does."""
        count = len(self._recent)
        if count < _LEAST:
            return False
        mean, square = self.loss, _SURE**2
        spread = _SURE * math.sqrt(mean * (1.0 - mean) / count + square / (4.0 * count**2))
        return (mean + square / (2.0 * count) - spread) / (1.0 + square / count) > self._mean(1)
