"""Distributions of token counts.

Each draws from the random source that it is given, so a seed decides everything. This module does
not know arrivals or time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from paceline.sim.workload.base import WorkloadError

__all__ = [
    "Bimodal",
    "Empirical",
    "Fixed",
    "Lengths",
    "Lognormal",
    "Scaled",
    "Uniform",
    "whole_tokens",
]

# cut of lognormal tails: longer than any model's context, and without overflow anywhere
_MAX_TOKENS = 10_000_000


def whole_tokens(value: float) -> int:
    """Return the nearest token count, at least 1."""
    return max(1, min(_MAX_TOKENS, round(value)))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise WorkloadError(message)


class Lengths(Protocol):
    """A source of token counts, each >= 1."""

    def sample(self, rng: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same count."""

    tokens: int

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"fixed length must be at least 1 token, got {self.tokens}")

    def sample(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.high,
            f"uniform lengths need 1 <= low <= high, got low={self.low}, high={self.high}",
        )

    def sample(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """``median * exp(sigma * N(0, 1))``; the mean is ``median * exp(sigma^2 / 2)``."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _require(
            self.median >= 1 and math.isfinite(self.median),
            f"lognormal median must be at least 1 token, got {self.median:g}",
        )
        _require(0 <= self.sigma <= 5, f"lognormal sigma must be in [0, 5], got {self.sigma:g}")

    def sample(self, rng: Random) -> int:
        return whole_tokens(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))


@dataclass(frozen=True, slots=True)
class Bimodal:
    """``short`` with probability ``share``, else ``long``."""

    short: Lengths
    long: Lengths
    share: float

    def __post_init__(self) -> None:
        _require(0 <= self.share <= 1, f"share of short must be in [0, 1], got {self.share:g}")

    def sample(self, rng: Random) -> int:
        return (self.short if rng.random() < self.share else self.long).sample(rng)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Measured values, drawn with replacement."""

    values: Sequence[int]

    def __post_init__(self) -> None:
        _require(len(self.values) > 0, "empirical lengths need at least one value, got none")

    def sample(self, rng: Random) -> int:
        return self.values[rng.randrange(len(self.values))]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another distribution times a factor."""

    lengths: Lengths
    factor: float

    def __post_init__(self) -> None:
        _require(
            self.factor > 0 and math.isfinite(self.factor),
            f"factor must be positive, got {self.factor:g}",
        )

    def sample(self, rng: Random) -> int:
        return whole_tokens(self.lengths.sample(rng) * self.factor)
