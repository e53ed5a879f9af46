"""Settings from vLLM's own: ``--additional-config '{"paceline": {...}}'`` and its limits.

Keys are those of ``SchedulerConfig``, but for what vLLM has flags for. Features that the plan does
not know are refused by name.

This module does not import vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.policies import POLICIES
from paceline.core.slo import MAX_SECONDS
from paceline.errors import ConfigError
from paceline.renamed import is_now

__all__ = ["KEY", "Settings", "read_settings", "untried"]

KEY: Final = "paceline"
# fields of SchedulerConfig that are not ours to set here, and why
_VLLM_HAS: Final = {
    "max_num_batched_tokens": "vLLM's --max-num-batched-tokens",
    "max_num_seqs": "vLLM's --max-num-seqs",
    "max_model_len": "vLLM's --max-model-len",
    "enable_chunked_prefill": "vLLM's --enable-chunked-prefill",
    "speculative_config": "vLLM's --speculative-config, which is not supported yet",
    "max_adapters": "vLLM's --max-loras",
    "preemption": "always recompute: the memory is vLLM's",
    "schedule_ahead_s": "without effect: vLLM plans a step as soon as the one before it began",
}
_DEFAULTS: Final[Mapping[str, Any]] = {"policy": "deadline"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one engine."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    # free blocks of vLLM's empty cache; where layers are of several kinds, one of ``cache`` stands
    # for several of them
    num_theirs: int
    # file that gets the steps and requests, for ``paceline simulate``; None: no file
    record: str | None = None


def read_settings(config: Any, num_blocks: int, num_groups: int, block_size: int) -> Settings:
    """Return the settings for a ``VllmConfig`` and the KV cache that vLLM has made, with a table of
    blocks for each of ``num_groups`` kinds of layers.

    Raises:
        ConfigError: an unknown key, a bad value, or a feature that is refused.
    """
    refused = list(_refused(config))
    if refused:
        raise ConfigError(f"paceline.vllm.PacedScheduler does not support {'; '.join(refused)}")
    given = (config.additional_config or {}).get(KEY, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"--additional-config: {KEY} must be an object, got {given!r}")
    values = dict(_DEFAULTS) | dict(given)
    record = values.pop("record", None)
    if record is not None and not isinstance(record, str):
        raise ConfigError(f"--additional-config: {KEY}.record must be a path, got {record!r}")
    for name, value in values.items():
        _check(name, value)
    rank = getattr(config.parallel_config, "data_parallel_rank", 0)
    if record is not None and rank:
        # each data parallel rank has an engine of its own
        record = f"{record}.{rank}"
    theirs, watermark = config.scheduler_config, CacheConfig(block_size=1, num_blocks=1).watermark
    slots = getattr(theirs, "max_num_active_seqs", None) or theirs.max_num_seqs
    tokens = getattr(theirs, "max_num_scheduled_tokens", None) or theirs.max_num_batched_tokens
    scheduler = SchedulerConfig(
        **values,
        max_num_batched_tokens=min(tokens, theirs.max_num_batched_tokens),
        max_num_seqs=min(slots, theirs.max_num_seqs),
        # running requests keep their slots also in steps that leave them out, where vLLM by itself
        # would give them to others, and would then end at the assertion that there are enough
        max_adapters=None if config.lora_config is None else config.lora_config.max_loras,
        max_model_len=config.model_config.max_model_len,
        enable_chunked_prefill=theirs.enable_chunked_prefill,
        preemption="recompute",
    )
    cache = CacheConfig(
        block_size=block_size,
        # vLLM starts only where the longest request fits: some kinds take fewer blocks for it
        num_blocks=max(num_blocks // num_groups, -(-scheduler.max_model_len // block_size))
        if num_groups > 1
        else num_blocks,
        watermark=max(watermark, getattr(theirs, "watermark", 0.0)),
        # prefixes are looked up in vLLM's cache alone
        enable_prefix_caching=False,
    )  # fmt: skip
    return Settings(scheduler=scheduler, cache=cache, num_theirs=num_blocks, record=record)


def _refused(config: Any) -> Iterator[str]:
    theirs, parallel = config.scheduler_config, config.parallel_config
    if config.speculative_config is not None:
        yield "--speculative-config"
    if config.kv_transfer_config is not None:
        yield "--kv-transfer-config (KV connectors)"
    if parallel.pipeline_parallel_size > 1:
        yield f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
    if config.model_config.runner_type == "pooling":
        yield "pooling models"
    if getattr(config.model_config, "is_diffusion", False):
        yield "diffusion models"
    if theirs.policy != "fcfs":
        yield f"--scheduling-policy {theirs.policy}: a request's priority counts without it"
    if getattr(theirs, "long_prefill_token_threshold", 0) > 0:
        yield "--long-prefill-token-threshold: chunks follow the targets"


def untried(config: Any) -> Iterator[str]:
    """Yield what a ``VllmConfig`` has that is passed through and was not tried."""
    if getattr(config.model_config, "is_multimodal_model", False):
        yield "multimodal inputs"
    if (ranks := getattr(config.parallel_config, "data_parallel_size", 1)) > 1:
        yield f"{ranks} data parallel ranks (targets are those of each rank)"


_FIELDS: Final = {each.name: each for each in dataclasses.fields(SchedulerConfig)}


def _check(name: str, value: Any) -> None:
    where = f"--additional-config: {KEY}.{name}"
    if name in _VLLM_HAS:
        raise ConfigError(f"{where} is {_VLLM_HAS[name]}")
    if name not in _FIELDS:
        known = sorted({*_FIELDS, "record"} - set(_VLLM_HAS))
        why = is_now((name,), known) or f"it knows {', '.join(known)}"
        raise ConfigError(f"{where} is not a setting; {why}")
    if name == "policy" and value not in tuple(POLICIES):
        raise ConfigError(f"{where} must be one of {', '.join(POLICIES)}, got {value!r}")
    if name == "tenant_weights":
        numbers = value.values() if isinstance(value, Mapping) else (value,)
        if not all(type(each) in (int, float) for each in numbers):
            raise ConfigError(f"{where} must be an object of numbers by tenant, got {value!r}")
        return
    if name == "policy" or (value is None and "None" in str(_FIELDS[name].type)):
        return
    kind = "bool" if _FIELDS[name].type == "bool" else "number"
    fits = type(value) is bool if kind == "bool" else type(value) in (int, float)
    if not fits:
        raise ConfigError(f"{where} must be a {kind}, got {value!r}")
    if kind == "number" and name.endswith("_s") and value > MAX_SECONDS:
        raise ConfigError(f"{where} must be at most {MAX_SECONDS:g} seconds, got {value!r}")
