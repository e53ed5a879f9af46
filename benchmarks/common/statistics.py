"""Statistics of runs. Figures of two sides come from runs in turns, so that other load on the
machine affects both alike."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Ratio", "paired_ratio", "percentile"]

_RESAMPLES = 2_000


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, linear between ranks, as numpy's default. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Ratio(NamedTuple):
    """Ratio of one side to the other: the median of the pairs, and the 95 % interval of their
    geometric mean (bootstrap over pairs)."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Return the ratio of interleaved runs, ``ours[i]`` next to ``theirs[i]``; all are positive."""
    rng = random.Random(seed)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    cut = _RESAMPLES // 40
    return Ratio(statistics.median(ratios), math.exp(means[cut]), math.exp(means[-cut - 1]))
