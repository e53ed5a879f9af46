"""Statistics of runs. Figures of two sides come from runs in turns, so that other load on the
machine affects both alike."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "PooledRatio",
    "Ratio",
    "RatioOfSums",
    "paired_ratio",
    "percentile",
    "pooled_ratio",
    "ratio_of_sums",
]

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


class RatioOfSums(NamedTuple):
    """Ratio of the two sides' sums, and its 95 % interval (bootstrap over pairs)."""

    ratio: float
    low: float
    high: float


def ratio_of_sums(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0
) -> RatioOfSums | None:
    """Return the ratio of interleaved runs, ``ours[i]`` next to ``theirs[i]``; none is negative,
    single runs may be 0. None: theirs are all 0, and there is no ratio.

    A resample whose denominator is 0 counts as the largest ratio of the others, so the interval's
    upper end is too low rather than infinite where there are many of them.

    Raises ValueError for no runs, sides of different lengths, and negative values.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or min(map(min, pairs)) < 0.0:
        raise ValueError(f"need runs, none negative, got {pairs}")
    if not sum(theirs):
        return None
    rng = random.Random(seed)
    found = []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        denominator = sum(b for _, b in drawn)
        if denominator:
            found.append(sum(a for a, _ in drawn) / denominator)
    found.sort()
    found += [found[-1]] * (_RESAMPLES - len(found))
    cut = _RESAMPLES // 40
    return RatioOfSums(sum(ours) / sum(theirs), found[cut], found[-cut - 1])


class PooledRatio(NamedTuple):
    """Ratio of a quantile of all values of one side to the other's, and its 95 % interval."""

    ratio: float
    low: float
    high: float


# relative width of the bins in which values are counted
_BIN = 2e-4


def pooled_ratio(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    share: float,
    *,
    seed: int = 0,
) -> PooledRatio:
    """Return the ratio for short interleaved stretches, ``ours[i]`` next to ``theirs[i]``: each has
    too few values for a useful quantile of its own, all together have enough. The interval is from
    a bootstrap over pairs, so that load which lasts longer than a pair affects both sides.

    Values are positive, such as seconds. Raises ValueError for a side without any.
    """
    import numpy as np

    logs = [
        [np.log(np.maximum(1e-9, np.asarray(each, dtype=float))) for each in side]
        for side in (ours, theirs)
    ]
    if len(logs[0]) != len(logs[1]) or not all(any(each.size for each in side) for side in logs):
        raise ValueError("both sides need as many stretches, and values")
    least = min(each.min() for side in logs for each in side if each.size)
    most = max(each.max() for side in logs for each in side if each.size)
    size = int((most - least) / _BIN) + 1
    counts = [
        np.array(
            [np.bincount(((each - least) / _BIN).astype(int), minlength=size) for each in side]
        )
        for side in logs
    ]

    def at(side: int, weights: Any) -> Any:
        """Return the quantile's logarithm for each row of weights of the stretches."""
        below = np.cumsum(weights @ counts[side], axis=1)
        return np.array([np.searchsorted(row, share * row[-1]) for row in below]) * _BIN

    every = np.ones((1, len(ours)))
    ratio = float(np.exp(at(0, every) - at(1, every))[0])
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(_RESAMPLES // 100):
        # how often each pair is drawn
        weights = rng.multinomial(len(ours), [1.0 / len(ours)] * len(ours), size=100).astype(float)
        found.append(at(0, weights) - at(1, weights))
    low, high = np.exp(np.quantile(np.concatenate(found), (0.025, 0.975)))
    return PooledRatio(ratio, float(low), float(high))
