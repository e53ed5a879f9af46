"""Readings of the metrics of a server or a gateway, and the growth of metrics between two of them.

``Growth`` does not know what the metrics measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.errors import ConfigError

__all__ = ["Growth", "Quantiles", "Samples", "Scrape", "parse_metrics", "quantile", "ratio"]

# metrics that every server has, and every gateway
_OF_A_SERVER: Final = "vllm:num_requests_running"
_OF_A_GATEWAY: Final = "paceline:gateway_requests_waiting"
# labels and value of each series of one name
Samples: TypeAlias = tuple[tuple[Mapping[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one exposition."""

    # when it was requested, in seconds of the reader's clock
    time: float
    # by name, as on the wire: labels and value
    samples: Mapping[str, Samples]

    @property
    def is_gateway(self) -> bool:
        """Whether the reading is a gateway's and not a server's."""
        return _OF_A_GATEWAY in self.samples

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a name's samples that have these labels; 0.0 without any."""
        return sum(
            value
            for have, value in self.samples.get(name, ())
            if labels.items() <= have.items() and math.isfinite(value)
        )

    def one(self, name: str) -> float | None:
        """Return the first sample of a name; None if it is absent or not a number."""
        for _, value in self.samples.get(name, ()):
            return value if math.isfinite(value) else None
        return None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a name's samples by one label's values."""
        found: dict[str, float] = {}
        for have, value in self.samples.get(name, ()):
            if label in have:
                found[have[label]] = found.get(have[label], 0.0) + value
        return found

    def label(self, name: str, label: str) -> str | None:
        """Return a label's value on the first sample of a name."""
        for have, _ in self.samples.get(name, ()):
            return have.get(label)
        return None


def parse_metrics(text: str, time: float) -> Scrape:
    """Parse Prometheus' text format. Raises ConfigError for any other text."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"the answer is not in Prometheus' text format: {error}") from None
    if _OF_A_SERVER not in samples and _OF_A_GATEWAY not in samples:
        raise ConfigError("the metrics are not those of a Paceline server or gateway")
    return Scrape(time, {name: tuple(found) for name, found in samples.items()})


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
