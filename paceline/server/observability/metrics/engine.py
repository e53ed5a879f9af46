"""Metrics of the engine, read from its latest snapshot, and of faults: engines lost, requests sent
again, readers cut off.

Each number of the scheduler is one call in ``EngineMetrics.__init__``, which names its family and
the field of ``SchedulerStats`` it is read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Final, Literal

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.types import BlockStats, EngineFaults, EngineInfo, EngineStats, SchedulerStats
from paceline.http.exposition import Number, Registry
from paceline.http.slow_readers import SlowReaders
from paceline.server.observability.metrics.adapters import AdapterMetrics

__all__ = ["EngineMetrics", "FaultCollector"]

_ITERATION_TOKEN_BUCKETS: Final = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)  # fmt: skip

_Kind = Literal["counter", "gauge"]
# a field of SchedulerStats, or a function of several
_Read = str | Callable[[SchedulerStats], float]


class EngineMetrics:
    """Families that are read from an ``EngineStats``.

    Args:
        engine: value of the label ``engine``.
    """

    def __init__(self, registry: Registry, info: EngineInfo, engine: str) -> None:
        gauge: Final = "gauge"
        counter: Final = "counter"
        self._registry = registry
        self._readings: list[tuple[Number, Callable[[SchedulerStats], float]]] = []
        new, one, each = registry.numbers, self._one, self._each
        one(
            gauge,
            "vllm:num_requests_running",
            "Choices of requests in the running batch.",
            "num_running",
        )
        one(gauge, "vllm:num_requests_waiting", "Choices waiting to run.", "num_waiting")
        each(
            gauge,
            "vllm:num_requests_waiting_by_reason",
            "Waiting for memory or a place (capacity), or for an event (deferred).",
            "reason",
            {"capacity": "num_waiting_capacity", "deferred": "num_waiting_deferred"},
        )
        one(
            gauge,
            "vllm:kv_cache_usage_perc",
            "Share of the KV blocks in use; 1 is all of them.",
            lambda now: (now.num_blocks - now.num_free_blocks) / max(1, now.num_blocks),
        )
        config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": str(info.enable_prefix_caching),
            "engine": engine,
        }
        new(
            gauge, "vllm:cache_config_info", "The KV cache's configuration.", constant=config
        ).at().value = 1
        one(
            counter,
            "vllm:num_preemptions",
            "Times a running request gave up its blocks.",
            "num_preemptions",
        )
        one(
            counter,
            "vllm:spec_decode_num_drafts",
            "Rows in which guessed tokens were verified.",
            "num_drafts",
        )
        one(
            counter,
            "vllm:spec_decode_num_draft_tokens",
            "Guessed tokens that were verified.",
            "num_draft_tokens",
        )
        one(
            counter,
            "vllm:spec_decode_num_accepted_tokens",
            "Guessed tokens that were right.",
            "num_accepted_tokens",
        )
        self._accepted_by_place = new(
            counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place in the row.",
            "position",
        )
        self._drafted = new(
            counter,
            "paceline:spec_decode_draft_tokens",
            "Guessed tokens that were verified, by who guessed.",
            "source",
        )
        self._accepted = new(
            counter,
            "paceline:spec_decode_accepted_tokens",
            "Guessed tokens that were right, by who guessed.",
            "source",
        )
        self._answers = registry.number(
            gauge,
            "paceline:finished_answers_bytes",
            "Finished answers that are kept to guess later ones of the same caller from.",
        )
        one(
            counter,
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            "prefix_cache_queries",
        )
        one(
            counter,
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            "prefix_cache_hits",
        )
        self._iteration_tokens = registry.histogram(
            "vllm:iteration_tokens_total",
            "Tokens that a step brought, and the prompts whose first token was among them.",
            _ITERATION_TOKEN_BUCKETS,
        )
        self._steps = registry.number(counter, "paceline:steps", "Steps that the engine completed.")
        each(
            counter,
            "paceline:step_tokens",
            "Tokens computed: one of a request that is one behind (decode), or several (prefill).",
            "kind",
            {"prefill": "num_prefill_tokens", "decode": "num_decode_tokens"},
        )
        each(
            counter,
            "paceline:step_seconds",
            "Time of the steps whose time was predicted, predicted and actual.",
            "kind",
            {"predicted": "predicted_step_seconds", "actual": "actual_step_seconds"},
        )
        self._requests = new(
            gauge,
            "paceline:requests",
            "Choices by SLO class, running or waiting.",
            "slo_class",
            "state",
        )
        self._blocks = new(
            gauge,
            "paceline:kv_blocks",
            "KV blocks by owner: an SLO class, the prefix cache (idle but findable), free.",
            "owner",
        )
        each(
            gauge,
            "paceline:kv_host_blocks",
            "Blocks in host memory for swapping.",
            "state",
            {
                "used": lambda now: now.num_host_blocks - now.num_free_host_blocks,
                "free": "num_free_host_blocks",
            },
        )
        each(
            gauge,
            "paceline:kv_window_blocks",
            "Blocks of layers with a sliding window; none where these share the other KV blocks.",
            "state",
            {
                "used": lambda now: now.num_window_blocks - now.num_free_window_blocks,
                "free": "num_free_window_blocks",
            },
        )
        self._blocked = new(
            gauge,
            "paceline:queue_blocked",
            "1 for what blocks the head of the queue now, 0 for the other reasons.",
            "reason",
        )
        self._blocked_seconds = new(
            counter,
            "paceline:queue_blocked_seconds",
            "Seconds the head of the queue was blocked.",
            "reason",
        )
        self._refused = new(
            counter, "paceline:requests_refused", "Requests refused or expired.", "reason"
        )
        one(
            counter,
            "paceline:requests_demoted",
            "Times a request was demoted: its first token or best-effort deadline would be late.",
            "num_demoted",
        )
        each(
            counter,
            "paceline:wasted_tokens",
            "Tokens computed again after a preemption, or for no request.",
            "cause",
            {"recomputed": "num_recomputed_tokens", "discarded": "num_discarded_tokens"},
        )
        each(
            counter,
            "paceline:swapped_blocks",
            "KV blocks moved to and from host memory.",
            "direction",
            {"out": "num_swapped_out_blocks", "in": "num_swapped_in_blocks"},
        )
        self._fetched = new(
            counter,
            "paceline:kv_fetch_tokens",
            "Tokens whose KV was wanted from disk or a peer, by what became of it.",
            "source",
            "result",
        )
        self._sent = registry.number(
            counter, "paceline:kv_sent_tokens", "Tokens whose KV was given to other engines."
        )
        self._store_up = registry.number(
            gauge,
            "paceline:kv_store_up",
            "1 while KV blocks are kept on disk; 0 without a folder or after an error.",
        )
        self._store_bytes = registry.number(
            gauge, "paceline:kv_store_bytes", "Bytes of KV blocks on disk."
        )
        self._store_moved = new(
            counter,
            "paceline:kv_store_moved_bytes",
            "KV bytes written to and read from disk.",
            "way",
        )
        self._store_errors = new(
            counter,
            "paceline:kv_store_errors",
            "KV blocks that were not as written (checksum), failed (disk), or were left out as too "
            "many waited to be written (busy).",
            "kind",
        )
        # None: the engine serves none
        self._adapters = AdapterMetrics(registry, info) if info.adapter_bytes else None
        one(
            gauge,
            "paceline:memory_pressure_level",
            "Of the memory-pressure valve: 0 closed, 4 refusing.",
            "pressure_level",
        )
        slots = registry.number(
            gauge, "paceline:max_num_seqs", "Requests that run at once, at most."
        )
        slots.value = info.max_num_seqs

    def _one(self, kind: _Kind, name: str, text: str, read: _Read) -> None:
        """Add a family of one series, read from each snapshot."""
        self._add(self._registry.number(kind, name, text), read)

    def _each(
        self, kind: _Kind, name: str, text: str, label: str, reads: Mapping[str, _Read]
    ) -> None:
        """Add a family with a series for each value of ``label``."""
        family = self._registry.numbers(kind, name, text, label)
        for value, read in reads.items():
            self._add(family.at(value), read)

    def _add(self, number: Number, read: _Read) -> None:
        self._readings.append((number, attrgetter(read) if isinstance(read, str) else read))

    def observe_steps(self, stats: EngineStats) -> None:
        """Count the tokens of the latest steps; call once for every snapshot."""
        for num_tokens in stats.iteration_tokens:
            self._iteration_tokens.observe(num_tokens)

    def update(self, stats: EngineStats) -> None:
        """Copy a snapshot's numbers; callable any number of times."""
        now = stats.scheduler
        self._steps.value = stats.num_steps
        self._answers.value = stats.finished_answers_bytes
        if self._adapters is not None and stats.adapters is not None:
            self._adapters.update(stats.adapters)
        for number, read in self._readings:
            number.value = read(now)
        self._update_classes(stats)
        self._update_blocks(stats.blocks or BlockStats())
        for reason, _ in now.waited:
            self._blocked.at(reason).value = float(reason == now.blocked_by)
        for reason, seconds in now.waited:
            self._blocked_seconds.at(reason).value = seconds
        for family, counts in (
            (self._refused, now.refused),
            (self._accepted_by_place, now.accepted_by_place),
            (self._drafted, now.drafted),
            (self._accepted, now.accepted),
        ):
            for label, count in counts:
                family.at(label).value = count

    def _update_blocks(self, now: BlockStats) -> None:
        for source, result, tokens in now.fetched:
            self._fetched.at(source, result).value = tokens
        self._sent.value = now.sent_tokens
        self._store_up.value, self._store_bytes.value = now.store_up, now.store_bytes
        self._store_moved.at("written").value = now.written_bytes
        self._store_moved.at("read").value = now.read_bytes
        for kind, count in now.errors:
            self._store_errors.at(kind).value = count

    def _update_classes(self, stats: EngineStats) -> None:
        now = stats.scheduler
        self._requests.clear()
        for use in stats.classes:
            self._requests.at(use.slo_class, "running").value = use.num_running
            self._requests.at(use.slo_class, "waiting").value = use.num_waiting
        # a block shared by several requests is in the table of each
        in_tables = sum(use.num_blocks for use in stats.classes)
        in_use = now.num_blocks - now.num_free_blocks
        owners = {
            use.slo_class: in_use * use.num_blocks / in_tables
            for use in stats.classes
            if use.num_blocks
        }
        # a class may have one of these names; then its blocks are added
        for owner, count in (
            ("prefix_cache", now.num_cached_free_blocks),
            ("free", now.num_free_blocks - now.num_cached_free_blocks),
        ):
            owners[owner] = owners.get(owner, 0.0) + count
        self._blocks.replace(owners)


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
