"""Drift: whether the scores of recent requests are still like those of the labels.

No right answers are needed for that. A bound on the loss holds for requests like the labels alone,
so a large distance says that it is time for new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drift", "distance"]

# scores that are compared, and after how many new ones again
_RECENT: Final = 200
_EVERY: Final = 50


def distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples: the largest difference between their
    shares below any value, 0 to 1."""
    points = np.concatenate((one, other))
    below = (np.searchsorted(np.sort(each), points, "right") / len(each) for each in (one, other))
    first, second = below
    return float(np.abs(first - second).max())


class Drift:
    """Distance of recent scores from the labels'."""

    def __init__(self, scores: Sequence[float]) -> None:
        self._labels = np.array(scores, np.float64)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_new = 0

    def saw(self, score: float) -> None:
        self._recent.append(score)
        self._num_new += 1

    def take(self) -> float | None:
        """Return the distance, once for so many new scores; None: not now."""
        if self._num_new < _EVERY or len(self._recent) < _RECENT // 2:
            return None
        self._num_new = 0
        return distance(self._labels, np.array(self._recent))
