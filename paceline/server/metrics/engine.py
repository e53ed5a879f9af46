"""What the engine says of itself, from the latest of its snapshots."""

from __future__ import annotations

from typing import Final

from paceline.core.queues.wait_clocks import REASONS
from paceline.engine.types import EngineInfo, EngineStats
from paceline.http.exposition import Registry
from paceline.server.metrics.buckets import ITERATION_TOKEN_BUCKETS

__all__ = ["EngineMetrics"]


class EngineMetrics:
    """Families that are read off an ``EngineStats``.

    Args:
        engine: value of the label ``engine``.
    """

    def __init__(self, registry: Registry, info: EngineInfo, engine: str) -> None:
        gauge: Final = "gauge"
        counter: Final = "counter"
        new, one = registry.numbers, registry.number
        self._running = one(
            gauge, "vllm:num_requests_running", "Choices of requests in the running batch."
        )
        self._waiting = one(gauge, "vllm:num_requests_waiting", "Choices waiting to run.")
        self._waiting_by_reason = new(
            gauge,
            "vllm:num_requests_waiting_by_reason",
            "Waiting for memory or a place (capacity), or for an event (deferred).",
            "reason",
        )
        self._kv_usage = one(
            gauge, "vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them."
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
        self._preemptions = one(
            counter, "vllm:num_preemptions", "Times a running request gave up its blocks."
        )
        self._cache_queries = one(
            counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._cache_hits = one(
            counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._iteration_tokens = registry.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", ITERATION_TOKEN_BUCKETS
        )
        self._step_tokens = new(
            counter,
            "paceline:step_tokens",
            "Tokens computed: one of a request that is one behind (decode), or several (prefill).",
            "kind",
        )
        self._step_seconds = new(
            counter,
            "paceline:step_seconds",
            "Time of the steps whose time was predicted, predicted and actual.",
            "kind",
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
        self._host_blocks = new(
            gauge, "paceline:kv_host_blocks", "Blocks in host memory for swapping.", "state"
        )
        self._held = new(
            gauge,
            "paceline:queue_held",
            "1 for what holds the head of the queue up now, 0 for the other reasons.",
            "reason",
        )
        self._held_seconds = new(
            counter,
            "paceline:queue_held_seconds",
            "Seconds the head of the queue was held up.",
            "reason",
        )
        self._refused = new(
            counter, "paceline:requests_refused", "Requests refused or dropped.", "reason"
        )
        self._relegated = one(
            counter,
            "paceline:requests_relegated",
            "Times a request made way: its first token, or best-effort deadline, would be late.",
        )
        self._wasted = new(
            counter,
            "paceline:wasted_tokens",
            "Tokens computed again after a preemption, or for nobody.",
            "cause",
        )
        self._swapped = new(
            counter,
            "paceline:swapped_blocks",
            "KV blocks moved to and from host memory.",
            "direction",
        )
        self._pressure = one(
            gauge,
            "paceline:memory_pressure_level",
            "Of the memory-pressure valve: 0 closed, 4 refusing.",
        )

    def observe_steps(self, stats: EngineStats) -> None:
        """Take in the token counts of the latest steps; once for every snapshot."""
        for num_tokens in stats.iteration_tokens:
            self._iteration_tokens.observe(num_tokens)

    def update(self, stats: EngineStats) -> None:
        """Take over a snapshot's numbers; any number of times."""
        self._running.value = stats.num_running
        self._waiting.value = stats.num_waiting
        self._waiting_by_reason.at("capacity").value = stats.num_waiting_capacity
        self._waiting_by_reason.at("deferred").value = stats.num_waiting_deferred
        self._kv_usage.value = 1.0 - stats.num_free_blocks / max(1, stats.num_blocks)
        self._preemptions.value = stats.num_preemptions
        self._cache_queries.value = stats.prefix_cache_queries
        self._cache_hits.value = stats.prefix_cache_hits
        self._step_tokens.at("prefill").value = stats.num_prefill_tokens
        self._step_tokens.at("decode").value = stats.num_decode_tokens
        self._step_seconds.at("predicted").value = stats.predicted_step_seconds
        self._step_seconds.at("actual").value = stats.actual_step_seconds
        self._update_classes(stats)
        host_free = stats.num_free_host_blocks
        self._host_blocks.at("used").value = stats.num_host_blocks - host_free
        self._host_blocks.at("free").value = host_free
        for reason in REASONS:
            self._held.at(reason).value = float(reason == stats.held_by)
        for reason, seconds in stats.waited:
            self._held_seconds.at(reason).value = seconds
        for reason, count in stats.refused:
            self._refused.at(reason).value = count
        self._relegated.value = stats.num_relegated
        self._wasted.at("recomputed").value = stats.num_recomputed_tokens
        self._wasted.at("discarded").value = stats.num_discarded_tokens
        self._swapped.at("out").value = stats.num_swapped_out_blocks
        self._swapped.at("in").value = stats.num_swapped_in_blocks
        self._pressure.value = stats.pressure_level

    def _update_classes(self, stats: EngineStats) -> None:
        self._requests.clear()
        for use in stats.classes:
            self._requests.at(use.slo_class, "running").value = use.num_running
            self._requests.at(use.slo_class, "waiting").value = use.num_waiting
        # a block that several requests share stands in the table of each
        in_tables = sum(use.num_blocks for use in stats.classes)
        in_use = stats.num_blocks - stats.num_free_blocks
        owners = {
            use.slo_class: in_use * use.num_blocks / in_tables
            for use in stats.classes
            if use.num_blocks
        }
        # a class may bear one of these names too; then its blocks are added
        for owner, count in (
            ("prefix_cache", stats.num_cached_free_blocks),
            ("free", stats.num_free_blocks - stats.num_cached_free_blocks),
        ):
            owners[owner] = owners.get(owner, 0.0) + count
        self._blocks.replace(owners)
