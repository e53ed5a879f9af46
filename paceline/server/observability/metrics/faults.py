"""Metrics of faults: engines lost, requests sent again, readers cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.types import EngineFaults
from paceline.http.slow_readers import SlowReaders

__all__ = ["FaultCollector"]

_KINDS: Final = ("exit", "stalled", "stopped")
_LABELS: Final = ("model_name", "engine")


class FaultCollector(Collector):
    """Reads ``faults`` and ``readers`` at each scrape."""

    def __init__(
        self, faults: Callable[[], EngineFaults], readers: SlowReaders, model_name: str
    ) -> None:
        self._faults = faults
        self._readers = readers
        self._labels = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        faults = self._faults()
        losses = dict.fromkeys(_KINDS, 0) | dict(faults.losses)
        yield self._gauge("engine_up", "1 while an engine is ready.", faults.up)
        yield self._counter(
            "engine_failures",
            "Engines that ended (exit) or were ended because a step or the process stood still.",
            "kind",
            losses,
        )
        yield self._gauge(
            "engine_recovery_seconds",
            "From the latest failure of an engine to the readiness of the next.",
            faults.recovery_seconds,
        )
        yield self._counter(
            "engine_failure_requests",
            "Requests under way when an engine failed: sent once more (resent), failed because it "
            "happened too often (lost), or because it was their fault (poisoned).",
            "outcome",
            {
                "resent": faults.num_resent,
                "lost": faults.num_lost,
                "poisoned": faults.num_poisoned,
            },
        )
        yield self._gauge(
            "slow_readers", "Connections whose buffers are full.", self._readers.waiting
        )
        cut = CounterMetricFamily(
            "paceline:slow_readers_cut",
            "Connections cut off because their callers did not read.",
            labels=_LABELS,
        )
        cut.add_metric(self._labels, self._readers.num_cut)
        yield cut

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"paceline:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"paceline:{name}", text, labels=(*_LABELS, label))
        for value, count in counts.items():
            family.add_metric((*self._labels, value), count)
        return family
