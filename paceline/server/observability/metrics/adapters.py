"""Metrics of LoRA adapters, read from the engine's latest snapshot. Without ``--enable-lora`` there
are none."""

from __future__ import annotations

import time
from collections.abc import Iterable

from paceline.engine.types import AdapterStats, EngineInfo
from paceline.http.exposition import Registry

__all__ = ["AdapterMetrics"]


class AdapterMetrics:
    """Families that are read from an ``AdapterStats``."""

    def __init__(self, registry: Registry, info: EngineInfo) -> None:
        self._most = str(info.max_adapters or "")
        self._requests = registry.numbers(
            "gauge",
            "vllm:lora_requests_info",
            "Time of reading; the labels name adapters of requests. One that runs does not wait.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        self._loaded = registry.numbers(
            "gauge",
            "vllm:lora_adapter_loaded",
            "1 for each adapter in memory, of at most 50 that were used last.",
            "adapter_name",
            "level",
            "pinned",
        )
        self._bytes = registry.number("gauge", "paceline:adapter_bytes", "Of adapters in memory.")
        self._resident = registry.number(
            "gauge", "paceline:adapters_resident", "Adapters in memory."
        )
        self._loads = registry.numbers(
            "counter", "paceline:adapter_loads", "Loads: loaded, failed, no_room.", "outcome"
        )
        self._seconds = registry.number(
            "counter", "paceline:adapter_load_seconds", "Time of the loads that succeeded."
        )
        self._gone = registry.numbers(
            "counter",
            "paceline:adapter_evictions",
            "Adapters that left memory: for room, or unloaded.",
            "reason",
        )
        self._waits = registry.number(
            "counter",
            "paceline:adapter_wait_seconds",
            "Time that requests waited for their adapter, before they were queued.",
        )

    def update(self, stats: AdapterStats) -> None:
        """Copy a snapshot's numbers; callable any number of times."""
        self._requests.forget()
        others = ["other"] * (stats.num_others > 0)
        running = ",".join([*_names(stats.running), *others])
        self._requests.at(self._most, running, ",".join(_names(stats.waiting))).value = time.time()
        self._loaded.forget()
        for key, pinned in stats.resident:
            name = key.rpartition("#")[0]
            self._loaded.at(name, "cpu", "true" if pinned else "false").value = 1
        self._bytes.value, self._resident.value = stats.num_bytes, stats.num_resident
        self._seconds.value, self._waits.value = stats.load_seconds, stats.wait_seconds
        for family, counts in ((self._loads, stats.loads), (self._gone, stats.gone)):
            for label, count in counts:
                family.at(label).value = count


def _names(keys: Iterable[str]) -> list[str]:
    """Return the names that keys were made of, once each."""
    return sorted({key.rpartition("#")[0] for key in keys})
