"""The models of a server of several, from flags: what each may take, and how it is started."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from paceline.backends.loading.memory_estimate import served_memory
from paceline.backends.machine.cpu import available_memory
from paceline.checkpoints.gguf.shards import weight_files
from paceline.checkpoints.open import open_adapter, open_checkpoint
from paceline.cli.flags.adapter_options import adapter_config, adapter_settings
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.block_options import block_settings
from paceline.cli.flags.model_options import GivenModel, check_names, model_arguments
from paceline.cli.flags.options import engine_settings
from paceline.cli.flags.server_options import RESTART_WINDOW
from paceline.cli.flags.settings import ENGINE_PROCESS, EngineSettings
from paceline.cli.serve.few_bits import few_bits
from paceline.cli.wiring import build_tokenizer
from paceline.engine.models.client import Start
from paceline.engine.models.ledger import Account, kv_quota
from paceline.engine.models.model import ModelSpec
from paceline.engine.models.page import TurnUse, read_uses
from paceline.engine.models.pool import ModelPool
from paceline.engine.models.states import ModelStates
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.process.forks import ForkServer
from paceline.engine.protocol import EngineClient, Tokenizer
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.types import EngineInfo
from paceline.errors import CheckpointError, ConfigError, EngineError, PacelineError

__all__ = ["Several", "prepare", "start_pool", "turn_uses"]

_log = logging.getLogger("paceline.cli")

# part of the free memory that models get where no number is given
_MEMORY_SHARE: Final = 0.8
# an engine's process without a model
_PROCESS_BYTES: Final = 64 * 2**20
# tokens of the longest request that a model's KV cache holds at least, unless --max-model-len says
_LEAST_TOKENS: Final = 4096
# most of the memory that the KV cache of one model gets by itself, as of a single model
_KV_SHARE: Final = 4
# part of a model's memory that its adapters get at most where no number is given
_ADAPTERS: Final = 10
# a pooled model's weights in memory over its files
_FILES: Final = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """The models of a server."""

    specs: tuple[ModelSpec, ...]
    # by name, of those that are not broken
    settings: Mapping[str, EngineSettings]
    arguments: Mapping[str, argparse.Namespace]
    # names on the command line, which are loaded at start as far as they fit
    named: tuple[str, ...]
    memory: int
    # the model of each adapter, by name
    adapters: Mapping[str, str]


def prepare(
    parser: Parser,
    args: argparse.Namespace,
    models: Sequence[GivenModel],
    *,
    timeline: bool,
    turns: Path,
) -> Several:
    """Return the models; reads the headers of their files, and fetches those named by the hub.

    Args:
        timeline: the page shows the steps of each model.
        turns: the page by which engines take turns.

    Raises:
        ConfigError, CheckpointError: one on the command line cannot be served. One of --models-dir
            is broken then, with that reason.
    """
    memory = args.memory or int(_MEMORY_SHARE * available_memory())
    if memory <= _PROCESS_BYTES:
        raise ConfigError(
            f"--memory must be more than {_PROCESS_BYTES >> 20} MiB, which the process takes that "
            f"waits for the next load; it is {memory / 2**20:.0f} MiB"
        )
    weights = sum(given.weight for given in models)
    specs: list[ModelSpec] = []
    settings: dict[str, EngineSettings] = {}
    arguments: dict[str, argparse.Namespace] = {}
    adapters: dict[str, str] = {}
    for given in models:
        name, broken, account, most_waiting = given.name, "", Account(), None
        try:
            own = model_arguments(parser, args, given)
            made = engine_settings(own, log_level=args.log_level, log_format=args.log_format)
            name, share = name or made.model_name, given.weight / weights
            most_waiting = made.scheduler.max_num_waiting
            made = _with_adapters(made, own, int(memory * share))
            account, kv_bytes = _account(made, memory, share)
            if account.kv and args.kv_store is not None:
                made = made.changed(**_kept_blocks(args, name, share))
            if kv_bytes is not None:
                made = made.changed(kv_cache_bytes=kv_bytes)
            made = replace(
                few_bits(made, makes=False).settings, model_name=name,
                timeline=timeline, turn_weight=given.weight,
                turn=None if _is_alone(given, models) else str(turns),
                cpus=None if given.cpus is None else tuple(sorted(given.cpus)),
            )  # fmt: skip
            if args.record is not None:
                made = replace(made, record=f"{Path(args.record).resolve()}.{len(settings)}")
            settings[name], arguments[name] = made, own
            adapters |= {module.name: name for module in own.lora_modules}
        except (CheckpointError, ConfigError) as error:
            if not given.found:
                raise
            broken = str(error)
            _log.warning("model_broken name=%s reason=%r", name, broken)
        specs.append(
            ModelSpec(
                name=name, account=account, aliases=given.aliases, weight=given.weight,
                pinned=given.pinned, keep_alive=given.keep_alive, broken=broken,
                max_waiting=most_waiting, fallback=given.fallback,
            )
        )  # fmt: skip
    check_names(
        [
            *(each for spec in specs for each in (spec.name, *spec.aliases)),
            *(module.name for own in arguments.values() for module in own.lora_modules),
        ],
        [spec.fallback for spec in specs],
    )
    if not settings:
        raise ConfigError(
            f"--models-dir {args.models_dir}: no model can be served: {specs[0].broken}"
        )
    pinned = [spec for spec in specs if spec.pinned]
    total = sum(spec.account.total for spec in pinned)
    if total > memory - _PROCESS_BYTES or len(pinned) > (args.models_max or len(pinned)):
        raise ConfigError(
            f"{len(pinned)} models are pinned, which take {total / 2**20:.0f} MiB: there are "
            f"{(memory - _PROCESS_BYTES) / 2**20:.0f} MiB for models"
            + (f", and --models-max is {args.models_max}" if args.models_max else "")
        )
    named = tuple(spec.name for spec, given in zip(specs, models, strict=True) if not given.found)
    return Several(
        specs=tuple(specs), settings=settings, arguments=arguments, named=named, memory=memory,
        adapters=adapters,
    )  # fmt: skip


def _with_adapters(settings: EngineSettings, own: argparse.Namespace, part: int) -> EngineSettings:
    """Return a model's settings with its adapters, whose files are checked, and their memory.

    Args:
        part: bytes of this model.
    """
    adapters = adapter_settings(own)
    if settings.model_path is None or not own.enable_lora:
        return settings.changed(**adapters)
    model = open_checkpoint(Path(settings.model_path)).config
    for module in adapter_config(own).modules:
        open_adapter(Path(module.path), model, own.max_lora_rank)
    return settings.changed(**adapters | {"lora_bytes": own.lora_memory or part // _ADAPTERS})


def _kept_blocks(args: argparse.Namespace, name: str, share: float) -> dict[str, Any]:
    """Return the settings of the KV blocks that a model keeps, in a folder of its own."""
    blocks = block_settings(args)
    folder = os.path.join(blocks["kv_store"], quote(name, safe=""))
    return blocks | {"kv_store": folder, "kv_store_bytes": int(blocks["kv_store_bytes"] * share)}


def _is_alone(given: GivenModel, models: Sequence[GivenModel]) -> bool:
    """Return whether no other model computes on any of a model's processors."""
    others = [each for each in models if each is not given]
    return given.cpus is not None and all(
        each.cpus is not None and not each.cpus & given.cpus for each in others
    )


def _account(settings: EngineSettings, memory: int, share: float) -> tuple[Account, int | None]:
    """Return what a model is expected to take, and the bytes of its KV cache; None: as its flags
    say, or it has none."""
    load = settings.load
    if settings.model_path is None:
        # NullBackend's blocks
        return Account(process=_PROCESS_BYTES), None
    path = Path(settings.model_path)
    try:
        found = served_memory(
            path, dtype=load.dtype, kv_dtype=load.kv_dtype, block_size=load.block_size,
            device=load.device,
        )  # fmt: skip
    except ConfigError:
        # an encoder has no KV cache to plan, and what no path here computes is found by its load
        size = sum(file.stat().st_size for file in weight_files(path))
        return Account(process=_PROCESS_BYTES, weights=int(_FILES * size)), None
    account = Account(
        process=max(_PROCESS_BYTES, found.process_bytes), weights=found.weight_bytes,
        swap=load.swap_bytes or 0, adapters=settings.lora_bytes or 0,
    )  # fmt: skip
    token = found.kv_bytes_per_token
    # by default half as much as the KV cache may be swapped to
    swaps = load.swap_bytes is None and settings.scheduler.preemption != "recompute"
    wanted = None
    if load.kv_cache_bytes is not None or load.num_blocks is not None:
        kv = load.kv_cache_bytes or int(token * load.block_size * (load.num_blocks or 0))
    else:
        least = int(token * (load.max_model_len or _LEAST_TOKENS))
        kv = kv_quota(memory, account.total, least, share, max(least, memory // _KV_SHARE))
        kv = wanted = max(least, kv * 2 // 3 if swaps else kv)
    return replace(account, kv=kv, swap=kv // 2 if swaps else account.swap), wanted


async def start_pool(
    several: Several,
    args: argparse.Namespace,
    successor: Callable[[EngineSettings, EngineInfo, int], EngineSettings],
) -> tuple[ModelPool, str]:
    """Return a pool with its first model in memory, and that model's name. Raises ConfigError where
    none can be loaded."""
    states = ModelStates(
        # a process waits for the next load, to be its parent
        several.specs, several.memory - _PROCESS_BYTES, max_models=args.models_max,
        keep_alive=args.keep_alive, switch_wait=args.model_switch_wait,
    )  # fmt: skip
    forks = ForkServer((*ENGINE_PROCESS, "forks"))
    starts = {
        name: _start(settings, forks, args.stall_timeout, args.max_engine_restarts, successor)
        for name, settings in several.settings.items()
    }
    pool = ModelPool(states, starts, measure=_measured, forks=forks)
    why = ""
    for name in several.named[:1] or tuple(several.settings):
        try:
            await pool.load(name)
        except EngineError as error:
            why = str(error)
            continue
        _load_named(pool, several.named)
        return pool, name
    await pool.close()
    raise ConfigError(why)


def _load_named(pool: ModelPool, named: Sequence[str]) -> None:
    """Have the models of the command line loaded, as far as they fit next to one another."""
    states = pool.states
    room, places = states.ledger.free, states.places
    for name in named[1:]:
        needed = states.models[name].account.total
        if needed <= room and places > 0:
            with suppress(PacelineError):
                states.load(name)
            room, places = room - needed, places - 1
    pool.start()


def _start(
    settings: EngineSettings,
    forks: ForkServer,
    stall_timeout: float,
    max_restarts: int,
    successor: Callable[[EngineSettings, EngineInfo, int], EngineSettings],
) -> Start:
    async def start(tokenizer: Tokenizer | None) -> EngineClient:
        def tokenizer_of() -> Tokenizer:
            return tokenizer or build_tokenizer(settings)

        async def engine(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
            wanted = settings if before is None else successor(settings, before.info, number)
            return await ProcessEngineClient.start(
                ENGINE_PROCESS,
                wanted.to_json(),
                tokenizer_of if before is None else lambda: before.tokenizer,
                stall_timeout=stall_timeout,
                forks=forks,
            )

        return await SupervisedEngineClient.start(
            engine, max_restarts=max_restarts, window=RESTART_WINDOW
        )

    return start


def turn_uses(pool: ModelPool, page: Path) -> dict[str, TurnUse]:
    """Return the use of turns by name of the model, of those in memory."""
    uses = {use.pid: use for use in read_uses(page)}
    found: dict[str, TurnUse] = {}
    for name, client in pool.clients.items():
        engine = client.engine
        if isinstance(engine, SupervisedEngineClient) and engine.pid in uses:
            found[name] = uses[engine.pid]
    return found


def _measured(engine: EngineClient, booked: Account) -> Account:
    """Return what a loaded engine takes: its process's memory as the system counts it, in which the
    KV cache is not yet, and the rest as booked."""
    assert isinstance(engine, SupervisedEngineClient), "engines of this server are supervised"
    try:
        status = Path(f"/proc/{engine.pid}/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return booked
    return replace(booked, process=0, weights=resident)
