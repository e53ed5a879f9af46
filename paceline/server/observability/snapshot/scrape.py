"""One reading of the metrics of a server or a gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.errors import ConfigError

__all__ = ["Samples", "Scrape", "parse_metrics"]

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
        raise ConfigError(f"what came is not Prometheus' text format: {error}") from None
    if _OF_A_SERVER not in samples and _OF_A_GATEWAY not in samples:
        raise ConfigError("the metrics that came are not those of a Paceline server or gateway")
    return Scrape(time, {name: tuple(found) for name, found in samples.items()})
