"""Cost against quality: which share of requests a router hands off, and what quality that leaves.

::

    quality of the large model   ________________ oracle: hands off first where most is gained
                                /     ____---
                               / __---   ____---  a router
                              /-  ____---         random: a straight line
    quality of the small one  |---
                              0        handed off        1

APGR is the area below a router's line, where 0 is the small model's quality and 1 the large one's:
0.5 for a random choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Interval", "Outcomes", "apgr", "auroc", "calls_saved", "curve", "interval", "oracle",
]  # fmt: skip

_BOOTSTRAPS: Final = 400
_Floats = NDArray[np.float64]


class Outcomes(msgspec.Struct, frozen=True):
    """Qualities of both models' answers to the same prompts, 0 to 1."""

    small: _Floats
    large: _Floats

    def at(self, index: NDArray[np.intp]) -> Outcomes:
        return Outcomes(self.small[index], self.large[index])

    @property
    def losses(self) -> _Floats:
        """The quality lost where the small answer is taken."""
        return np.maximum(0.0, self.large - self.small)


class Interval(msgspec.Struct, frozen=True):
    """A figure, and the middle 95 % of it over resampled prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def curve(outcomes: Outcomes, scores: _Floats) -> _Floats:
    """Return the quality with 0, 1, 2, ... prompts handed off, the lowest score first."""
    order = np.argsort(scores, kind="stable")
    gains = (outcomes.large - outcomes.small)[order]
    line: _Floats = outcomes.small.sum() + np.concatenate(([0.0], np.cumsum(gains)))
    return line / len(scores)


def apgr(outcomes: Outcomes, scores: _Floats) -> float:
    """Return the area of a router; NaN where the models do not differ."""
    line = curve(outcomes, scores)
    gap = line[-1] - line[0]
    if gap <= 0.0:
        return float("nan")
    # trapezes between two numbers of prompts
    return float(((line[1:] + line[:-1]) / 2.0 - line[0]).mean() / gap)


def oracle(outcomes: Outcomes) -> _Floats:
    """Return scores that know what is gained."""
    return outcomes.small - outcomes.large


def calls_saved(outcomes: Outcomes, scores: _Floats, share: float) -> float:
    """Return the most calls to the large model that can be saved, as a share, where ``share`` of
    its quality is kept."""
    line = curve(outcomes, scores)
    enough = np.flatnonzero(line >= share * line[-1] - 1e-9)
    return float(1.0 - enough[0] / len(scores)) if len(enough) else 0.0


def auroc(good: Sequence[bool] | NDArray[np.bool_], scores: _Floats) -> float:
    """Return the chance that a good answer scores higher than a bad one, a tie being half; NaN
    without both."""
    flags = np.asarray(good, bool)
    above, below = np.sort(scores[~flags]), scores[flags]
    if not len(above) or not len(below):
        return float("nan")
    less = np.searchsorted(above, below, "left") + np.searchsorted(above, below, "right")
    return float(less.mean() / 2.0 / len(above))


def interval(
    figure: Callable[[Outcomes, _Floats], float], outcomes: Outcomes, scores: _Floats, seed: int = 0
) -> Interval:
    """Return a figure with its bootstrap interval."""
    draw, count = np.random.default_rng(seed), len(scores)
    found = []
    for _ in range(_BOOTSTRAPS):
        index = draw.integers(0, count, count)
        found.append(figure(outcomes.at(index), scores[index]))
    low, high = (
        np.nanquantile(found, (0.025, 0.975)) if not np.isnan(found).all() else (np.nan,) * 2
    )
    return Interval(figure(outcomes, scores), float(low), float(high))
