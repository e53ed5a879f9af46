"""Confidence of a model in its answer, from the log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np

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
    count = len(tokens)
    if not count:
        return [0.0] * len(CONFIDENCE)
    logprobs = [token.logprob for token in tokens]
    if min(logprobs) < -_WIDEST or max(logprobs) > 0.0:
        logprobs = [min(max(each, -_WIDEST), 0.0) for each in logprobs]
    margins, entropy = _spread_of([token.top for token in tokens])
    beginning = _run(logprobs[:first], margins[:first], entropy)
    whole = beginning if count <= first else _run(logprobs, margins, entropy)
    return [*beginning, *whole, math.log(count)]


def _spread_of(tops: list[Sequence[float]]) -> tuple[list[float], Callable[[int], float]]:
    """Return the margin at each place, and what returns the mean entropy of the first places."""
    widest, is_full = max(2, *map(len, tops)), True
    if min(map(len, tops)) < widest:
        # a place without a candidate has one of no probability
        tops = [[*top, *[-math.inf] * (widest - len(top))] for top in tops]
        is_full = False
    ranked = np.fromiter(chain.from_iterable(tops), np.float64, widest * len(tops))
    ranked = ranked.reshape(-1, widest)
    ranked.sort(axis=1)
    told = np.maximum(ranked, -_WIDEST)
    shares = np.exp(ranked)
    rest = 1.0 - np.add.reduce(shares, axis=1)
    rest[rest < 1e-9] = 1.0
    margins = told[:, -1] - told[:, -2]
    if not is_full:
        margins[ranked[:, -2] == -math.inf] = _WIDEST
        rest[ranked[:, -1] == -math.inf] = 1.0
    logs = np.log(rest)

    def entropy(count: int) -> float:
        known = np.vdot(shares[:count], told[:count])
        return -float(known + np.vdot(rest[:count], logs[:count])) / count

    return margins.tolist(), entropy


def _run(
    logprobs: list[float], margins: list[float], entropy: Callable[[int], float]
) -> list[float]:
    """Return the parts of a run that ``_OF_RUN`` names."""
    found: list[float] = []
    for values in (logprobs, margins):
        ranked = sorted(values)
        mean = math.fsum(values) / len(values)
        found += [ranked[0], _quantile(ranked, 0.1), _quantile(ranked, 0.25), mean]
    return [*found, entropy(len(logprobs))]


def _quantile(ranked: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, between two of them in proportion. NumPy's own takes
    longer than all of the rest."""
    place = (len(ranked) - 1) * share
    below = int(place)
    value = ranked[below]
    if place > below:
        value += (place - below) * (ranked[below + 1] - value)
    return value
