"""Confidence of a model in its answer, from the log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["CONFIDENCE", "Token", "confidence_of"]

_PARTS: Final = ("min", "q10", "q25", "mean")
# parts of a run of tokens
_OF_RUN: Final = (
    *(f"logprob_{part}" for part in _PARTS), *(f"margin_{part}" for part in _PARTS), "entropy",
)  # fmt: skip
# names of what ``confidence_of`` returns, in order
CONFIDENCE: Final = (*(f"first_{name}" for name in _OF_RUN), *_OF_RUN, "log_length")
# a margin where no second token is given, and the most that a log-probability is taken below zero
_WIDEST: Final = 20.0


class Token(msgspec.Struct, frozen=True):
    """One generated token."""

    logprob: float
    # the likeliest tokens' at its place, in any order; empty: not given
    top: Sequence[float] = ()


def confidence_of(tokens: Sequence[Token], first: int) -> list[float]:
    """Return the values that ``CONFIDENCE`` names: first of the first ``first`` tokens, then of
    all. A prefix has all values, too: those of the whole answer are then those of the prefix.

    A margin is the difference between the two likeliest tokens; entropy is in nats, where all
    tokens that are not among ``top`` count as one.
    """
    if not tokens:
        return [0.0] * len(CONFIDENCE)
    rows = _numbers_of(tokens)
    beginning = _run(rows[:, :first])
    whole = beginning if len(tokens) <= first else _run(rows)
    return [*beginning, *whole, math.log(len(tokens))]


def _numbers_of(tokens: Sequence[Token]) -> NDArray[np.float64]:
    """Return the log-probabilities, margins and entropies of tokens, in three rows."""
    given = [token.top for token in tokens]
    widest, is_full = max(2, *map(len, given)), True
    if min(map(len, given)) < widest:
        # a place without a candidate has one of no probability
        given = [[*top, *[-math.inf] * (widest - len(top))] for top in given]
        is_full = False
    tops = np.fromiter(chain.from_iterable(given), np.float64, widest * len(given))
    tops = tops.reshape(-1, widest)
    tops.sort(axis=1)
    told = np.maximum(tops, -_WIDEST)
    shares = np.exp(tops)
    rest = 1.0 - np.add.reduce(shares, axis=1)
    rest[rest < 1e-9] = 1.0
    rows = np.empty((3, len(tokens)))
    rows[0] = [token.logprob for token in tokens]
    np.minimum(np.maximum(rows[0], -_WIDEST), 0.0, out=rows[0])
    np.subtract(told[:, -1], told[:, -2], out=rows[1])
    if not is_full:
        rows[1, tops[:, -2] == -math.inf] = _WIDEST
        rest[tops[:, -1] == -math.inf] = 1.0
    np.subtract(-np.add.reduce(shares * told, axis=1), rest * np.log(rest), out=rows[2])
    return rows


def _run(rows: NDArray[np.float64]) -> list[float]:
    """Return the parts of a run that ``_OF_RUN`` names."""
    means = (np.add.reduce(rows, axis=1) / rows.shape[1]).tolist()
    found: list[float] = []
    for values, mean in zip(rows[:2].tolist(), means, strict=False):
        values.sort()
        found += [values[0], _quantile(values, 0.1), _quantile(values, 0.25), mean]
    return [*found, means[2]]


def _quantile(ranked: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, between two of them in proportion. NumPy's own takes
    longer than all of the rest."""
    place = (len(ranked) - 1) * share
    below = int(place)
    value = ranked[below]
    if place > below:
        value += (place - below) * (ranked[below + 1] - value)
    return value
