"""Growth of metrics between two readings.

This module does not know what the metrics measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.server.observability.snapshot.scrape import Scrape

__all__ = ["Growth", "Quantiles", "quantile", "ratio"]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a histogram's observations between two readings, in seconds; None without any. A
    value equal to ``floor`` is an upper bound: the histogram does not resolve smaller ones."""

    p50: float | None
    p99: float | None
    count: int
    # the lowest bound of the histogram
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Counters of two readings; ``after`` is the later one."""

    before: Scrape
    after: Scrape

    @classmethod
    def since(cls, before: Scrape, after: Scrape, counter: str) -> Growth:
        """Return the growth; if ``counter`` fell (after a restart) all counters start from zero."""
        if after.total(counter) < before.total(counter):
            before = Scrape(before.time, {})
        return cls(before, after)

    @property
    def seconds(self) -> float:
        """Seconds between the readings; above 0."""
        return max(1e-9, self.after.time - self.before.time)

    def total(self, name: str, **labels: str) -> float:
        """Return the growth of ``Scrape.total``."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the growth of ``Scrape.by``, for entries that grew."""
        then = self.before.by(name, label)
        grown = {key: now - then.get(key, 0.0) for key, now in self.after.by(name, label).items()}
        return {key: count for key, count in grown.items() if count > 0}

    def quantiles(self, name: str) -> Quantiles:
        """Return quantiles of a histogram's observations between the readings."""
        then = self.before.by(f"{name}_bucket", "le")
        counts = {
            float(bound): count - then.get(bound, 0.0)
            for bound, count in self.after.by(f"{name}_bucket", "le").items()
        }
        total = int(counts.get(math.inf, 0.0))
        floor = min(counts, default=0.0)
        return Quantiles(quantile(0.5, counts), quantile(0.99, counts), total, floor)


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole; None if ``whole`` is not above 0."""
    return part / whole if whole > 0 else None


def quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """Return a quantile of a histogram, as PromQL's ``histogram_quantile`` estimates it: linear
    within a bucket, and the last finite bound for values above it. But in the lowest bucket return
    its bound: a line from zero would estimate 0.15 s for values of 1 ms under a bound of 0.3 s.

    Args:
        counts: observations up to and including each bound, infinity among them.
    """
    total = counts.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted, below, under = share * total, 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= wanted:
            if bound == math.inf:
                return under
            if not under:
                return bound
            inside = counts[bound] - below
            return under + (bound - under) * ((wanted - below) / inside if inside else 1.0)
        below, under = counts[bound], bound
    return under
