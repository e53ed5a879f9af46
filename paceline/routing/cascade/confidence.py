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
# a margin where no second token is given, and the most that a log-probability may be below zero
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
    rows = np.array([_numbers_of(token) for token in tokens])
    told = [*_run(rows[:first]), *_run(rows), math.log(len(tokens))]
    return np.array(told, np.float32)


def _numbers_of(token: Token) -> tuple[float, float, float]:
    """Return a token's log-probability, margin and entropy."""
    logprob = max(-_WIDEST, token.logprob) if token.logprob <= 0.0 else 0.0
    top = sorted((max(-_WIDEST, each) for each in token.top if each <= 0.0), reverse=True)
    margin = top[0] - top[1] if len(top) > 1 else _WIDEST
    shares = [math.exp(each) for each in top]
    rest = 1.0 - sum(shares)
    entropy = -sum(share * each for share, each in zip(shares, top, strict=True))
    if rest > 1e-9 and top:
        entropy -= rest * math.log(rest)
    return logprob, margin, entropy


def _run(rows: NDArray[np.float64]) -> list[float]:
    found: list[float] = []
    for column in (rows[:, 0], rows[:, 1]):
        found += [column.min(), *np.quantile(column, (0.1, 0.25)), column.mean()]
    return [*found, rows[:, 2].mean()]
