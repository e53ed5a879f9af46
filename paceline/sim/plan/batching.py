"""Static against continuous batching, by arithmetic.

A static batch of B requests lasts as long as its longest; a continuous one refills each slot when
it becomes free. With steps of equal length the gain is E[longest of B] / E[output]: the textbook's.
Steps differ: one with R rows takes ``fixed + row * R`` seconds, and a static batch also saves the
time per row once its short requests have ended (if it drops them). So::

    static, padded       B * mean / (E[max] * (fixed + row * B))
    static, dropped      B * mean / (fixed * E[max] + row * B * mean)
    continuous           B        / (fixed + row * B)

tokens a second. Assumes a queue that is never empty, and leaves prompts out;
docs/studies/batching.md simulates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError

__all__ = ["BatchingEstimate", "estimate_batching", "expected_longest"]


def expected_longest(lengths: Sequence[int], batch: int) -> float:
    """Return the mean of the longest of ``batch`` lengths drawn with replacement, exactly.

    The i-th smallest of n is the maximum with probability (i / n) ** B - ((i - 1) / n) ** B.
    """
    if not lengths or batch < 1:
        raise ConfigError(f"needs lengths and a batch of at least 1, got {len(lengths)}, {batch}")
    n = len(lengths)
    return sum(
        length * ((rank / n) ** batch - ((rank - 1) / n) ** batch)
        for rank, length in enumerate(sorted(lengths), 1)
    )


@dataclass(frozen=True, slots=True)
class BatchingEstimate:
    """Output tokens per second of each way, and the inputs they follow from."""

    batch: int
    mean: float
    longest: float
    padded: float
    dropped: float
    continuous: float

    @property
    def textbook_gain(self) -> float:
        """Continuous over padded static batching, as for equal steps."""
        return self.longest / self.mean

    @property
    def gain(self) -> float:
        """Continuous over the better static batching."""
        return self.continuous / self.dropped


def estimate_batching(
    lengths: Sequence[int], batch: int, *, fixed: float, row: float
) -> BatchingEstimate:
    """Estimate rates for outputs like ``lengths``, with steps of ``fixed + row * rows`` seconds.

    Raises:
        ConfigError: no lengths, or steps that take no time.
    """
    if fixed < 0 or row < 0 or fixed + row <= 0:
        raise ConfigError(f"step times must be 0 or more, not both 0; got {fixed:g}, {row:g} s")
    longest = expected_longest(lengths, batch)
    mean = sum(lengths) / len(lengths)
    work = batch * mean
    return BatchingEstimate(
        batch=batch,
        mean=mean,
        longest=longest,
        padded=work / (longest * (fixed + row * batch)),
        dropped=work / (fixed * longest + row * work),
        continuous=batch / (fixed + row * batch),
    )
