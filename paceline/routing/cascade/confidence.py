"""Confidence of a model in its answer, from the log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def confidence_of(tokens: Sequence[Token], first: int) -> NDArray[np.float32]:
    """Return the values that ``CONFIDENCE`` names: first of the first ``first`` tokens, then of
    all. A prefix has all values, too: those of the whole answer are then those of the prefix.

    A margin is the difference between the two likeliest tokens; entropy is in nats, where all
    tokens that are not among ``top`` count as one.
    """
    if not tokens:
        return np.zeros(len(CONFIDENCE), np.float32)
    rows = _numbers_of(tokens)
    told = [*_run(rows[:, :first]), *_run(rows), math.log(len(tokens))]
    return np.array(told, np.float32)


def _numbers_of(tokens: Sequence[Token]) -> NDArray[np.float64]:
    """Return the log-probabilities, margins and entropies of tokens, in three rows."""
    logprobs = np.array([token.logprob for token in tokens], np.float64)
    widest = max(2, max(len(token.top) for token in tokens))
    # a place without a candidate has one of no probability
    tops = np.array(
        [
            token.top
            if len(token.top) == widest
            else [*token.top, *[-math.inf] * (widest - len(token.top))]
            for token in tokens
        ],
        np.float64,
    )
    tops.sort(axis=1)
    told = np.maximum(tops, -_WIDEST)
    shares = np.exp(tops)
    rest = 1.0 - shares.sum(axis=1)
    rest[rest < 1e-9] = 1.0
    margins = told[:, -1] - told[:, -2]
    if tops[:, -2].min() == -math.inf:
        margins[tops[:, -2] == -math.inf] = _WIDEST
        rest[tops[:, -1] == -math.inf] = 1.0
    entropies = -(shares * told).sum(axis=1) - rest * np.log(rest)
    return np.array((np.minimum(np.maximum(logprobs, -_WIDEST), 0.0), margins, entropies))


def _run(rows: NDArray[np.float64]) -> list[float]:
    """Return the parts of a run that ``_OF_RUN`` names."""
    count = rows.shape[1]
    means = (rows.sum(axis=1) / count).tolist()
    found: list[float] = []
    for ranked, mean in zip(np.sort(rows[:2], axis=1).tolist(), means, strict=False):
        found += [ranked[0], _quantile(ranked, 0.1), _quantile(ranked, 0.25), mean]
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
