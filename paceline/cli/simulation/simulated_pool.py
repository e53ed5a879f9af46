"""The replicas that flags of ``paceline simulate`` describe, as objects of the simulator."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.plugins import load_policy, policy_names
from paceline.cli.flags.scheduling_options import (
    ADMISSION,
    SCHEDULING,
    default_settings,
    given_settings,
    naming_flags,
)
from paceline.cli.simulation.plan_fleet import given_shapes
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.adapters import AdapterSettings
    from paceline.sim.pool import Pool
    from paceline.sim.replica import ReplicaConfig
    from paceline.sim.step_times.spec import Source

__all__ = ["FLAGS", "pool_of"]

# number of blocks where no recording gives it
_NUM_BLOCKS = 8192
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 32_768
# flags of ``paceline serve``; several policies may be given, for a comparison
FLAGS = tuple(flag for flag in (*SCHEDULING, *ADMISSION) if flag.name != "--scheduling-policy")


def pool_of(args: argparse.Namespace, policy: str | None) -> Pool:
    """Make the pool that the flags of a simulation describe, with this policy; None: the recorded
    engine's, or the default. Raises ConfigError."""
    from paceline.routing import make_router
    from paceline.sim.pool import Disaggregation, Pool, ReplicaSpec
    from paceline.sim.step_times.spec import open_step_times
    from paceline.sim.transfer import KVTransfer

    decoding = args.decode_replicas or 0
    models = given_shapes(args)
    first = open_step_times(args.step_times, seed=args.seed, models=models)
    others = range(1, args.replicas + decoding)
    sources = [first, *(first.another(args.seed + index) for index in others)]
    config = _config(args, policy, sources[0])
    specs = [ReplicaSpec(config, source.times) for source in sources]
    split = None
    if decoding:
        per_token = sources[0].kv_bytes_per_token
        if per_token is None:
            raise ConfigError(
                f"--decode-replicas: {args.step_times} does not say how many bytes of KV cache a "
                "token takes; use roofline or profile step times"
            )
        transfer = KVTransfer(per_token, 1e9 * args.kv_bandwidth)
        split = Disaggregation(specs[args.replicas :], transfer, make_router(args.router))
    return Pool(specs[: args.replicas], make_router(args.router), split)


def _config(args: argparse.Namespace, policy: str | None, source: Source) -> ReplicaConfig:
    """Return the recorded engine's settings, or ``paceline serve``'s, with the flags applied."""
    from paceline.core.config import CacheConfig, SchedulerConfig
    from paceline.sim.replica import ReplicaConfig

    if policy is not None and policy not in policy_names():
        known = ", ".join(sorted(policy_names()))
        raise ConfigError(f"unknown policy {policy!r}; known: {known}")
    config = source.config
    if config is None:
        block_size = args.block_size or _BLOCK_SIZE
        served = default_settings((*SCHEDULING, *ADMISSION))
        config = ReplicaConfig(
            scheduler=SchedulerConfig(max_model_len=_MAX_MODEL_LEN, **_of(SchedulerConfig, served)),
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=source.num_blocks(block_size) or _NUM_BLOCKS,
                **_of(CacheConfig, served),
            ),
        )
    # the recorded engine's policy may be another package's
    load_policy(policy or config.scheduler.policy)
    given = given_settings(args, FLAGS)
    if policy is not None:
        given["policy"] = policy
    for name in ("max_model_len", "num_blocks", "block_size"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    if args.max_loras is not None:
        given["max_adapters"] = args.max_loras
    if args.no_enable_prefix_caching:
        given["enable_prefix_caching"] = False
    if args.swap_space is not None:
        given |= _host_memory(args, source, args.block_size or config.cache.block_size)
    with naming_flags():
        scheduler = replace(config.scheduler, **_of(SchedulerConfig, given))
    return replace(
        config,
        scheduler=scheduler,
        cache=replace(config.cache, **_of(CacheConfig, given)),
        pipeline_depth=given.get("pipeline_depth", config.pipeline_depth),
        max_tokens=args.max_tokens,
        acceptance=args.acceptance,
        adapters=_adapters(args, source),
    )


def _adapters(args: argparse.Namespace, source: Source) -> AdapterSettings:
    """Return sizes as given, and speeds as a recording shows them."""
    from paceline.sim.adapters import AdapterSettings
    from paceline.sim.step_times.recorded import RecordedStepTimes

    most = args.lora_memory
    sized = AdapterSettings(args.adapter_size, *(() if most is None else (most,)))
    if isinstance(source.times, RecordedStepTimes) and any(source.times.adapter_rates):
        read_byte, product = source.times.adapter_rates
        # a product is of a value of two bytes
        return replace(sized, read_byte=read_byte, row_byte=product / 2)
    return sized


def _host_memory(args: argparse.Namespace, source: Source, block_size: int) -> dict[str, Any]:
    per_token = source.kv_bytes_per_token
    if per_token is None:
        raise ConfigError(
            f"--swap-space: {args.step_times} does not say how many bytes of KV cache a token "
            "takes; use roofline or profile step times"
        )
    block_bytes = per_token * block_size
    return {
        "num_host_blocks": int(args.swap_space / block_bytes),
        "swap_block_seconds": block_bytes / (1e9 * args.kv_bandwidth),
    }


def _of(config: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return those ``values`` that are fields of ``config``."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in values.items() if name in names}
