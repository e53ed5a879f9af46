"""The composition root: settings in, a backend, an engine core and a tokenizer out.

``build_core`` runs in the engine's process (or in this one, for offline use); ``build_tokenizer``
in the process that makes text. Only ``build_core`` loads torch, and only where it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.checkpoints.hub.catalogue import ALIASES
from paceline.cli.flags.arguments import shown_bytes
from paceline.cli.flags.draft_model import draft_of, drafts_by_mtp
from paceline.cli.flags.plugins import load_policy
from paceline.cli.flags.settings import EngineSettings
from paceline.core.backend import BackendInfo, ModelBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.pooling import PoolingInfo
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.backends.machine.yielding import Beside
    from paceline.core.memory.kv_cache import KVCacheManager
    from paceline.engine.adapters.store import AdapterStore
    from paceline.engine.blocks.keeper import BlockKeeper
    from paceline.engine.core import EngineCore
    from paceline.engine.protocol import Sharing, Tokenizer
    from paceline.engine.types import EngineInfo

__all__ = [
    "build_backend",
    "build_core",
    "build_tokenizer",
    "choose_max_model_len",
    "default_sampling",
    "idle_blocks",
]

_log = logging.getLogger(__name__)

# the null backend has no memory to measure: enough blocks for its default number of requests
_NULL_BLOCKS = 4096
_NULL_MODEL_LEN = 8192
# least bytes for cached prefixes of a small model
_IDLE_BYTES = 256 * 2**20
# formats of weights next to which adapters are not rounded to bytes
_FLOATS = ("float32", "bfloat16", "float16")
# part of the free memory that adapters get where no number is given
_ADAPTER_SHARE = 10


def build_backend(
    settings: EngineSettings, *, own_process: bool = False, beside: Beside | None = None
) -> ModelBackend:
    """Load the model, or make the null backend.

    ``own_process``: nothing else runs in this process, so all of it may be bound to NUMA nodes.
    ``beside``: does what takes long, on any thread; None: the thread that will compute.

    Raises CheckpointError for a bad model, ConfigError for settings this machine does not support.
    """
    if settings.backend == "null":
        return _null_backend(settings)
    if settings.backend == "torch":
        return _model_backend(settings, own_process, beside)
    raise ConfigError(f"unknown backend {settings.backend!r}: use torch or null")


def _null_backend(settings: EngineSettings) -> ModelBackend:
    from paceline.backends.reference.null import NullBackend
    from paceline.engine.testing import ByteTokenizer

    load = settings.load
    for flag, value, unset in (
        ("--device", load.device, "auto"),
        ("--dtype", load.dtype, "auto"),
        ("--kv-dtype", load.kv_dtype, "auto"),
        ("--compute", load.compute, "auto"),
        ("--isa", load.isa, None),
        ("--packed-cache", load.packed_cache_bytes, None),
        ("--gpu-memory-utilization", load.gpu_memory_utilization, None),
        ("--tokenizer", settings.tokenizer, None),
        ("--chat-template", settings.chat_template, None),
        ("--threads", load.threads, None),
        ("--numa", load.numa, "auto"),
    ):
        if value != unset:
            raise ConfigError(f"{flag} {value} has no effect with --backend null: leave it out")
    num_blocks = load.num_blocks or _NULL_BLOCKS
    if load.kv_cache_bytes is not None:
        # NullBackend's layout: one 8-byte slot per token
        num_blocks = load.kv_cache_bytes // (8 * load.block_size)
        if num_blocks < 1:
            raise ConfigError(
                f"--kv-cache-memory {shown_bytes(load.kv_cache_bytes)} is too small for a block: "
                f"{load.block_size} tokens take {8 * load.block_size} bytes"
            )
    return NullBackend(
        vocab_size=ByteTokenizer().vocab_size,
        num_blocks=num_blocks,
        block_size=load.block_size,
        max_model_len=_NULL_MODEL_LEN,
        step_time=settings.null_step_time,
        num_host_blocks=(
            num_blocks // 2 if load.swap_bytes is None else load.swap_bytes // (8 * load.block_size)
        ),
    )


def _model_backend(
    settings: EngineSettings, own_process: bool, beside: Beside | None
) -> ModelBackend:
    from paceline.backends.loading.load import load_backend
    from paceline.backends.machine.yielding import at_once

    assert settings.model_path is not None  # checked by EngineSettings
    load = settings.load
    if settings.scheduler.preemption == "recompute":
        # host memory that would never be used
        load = replace(load, swap_bytes=0)
    elif settings.scheduler.preemption == "swap":
        # swapping does not move window blocks
        load = replace(load, without_windows="--preemption swap moves whole blocks")
    if settings.keeps_blocks:
        load = replace(load, without_windows="--kv-store and --kv-port move whole blocks")
    if settings.enable_lora:
        load = replace(load, adapter_bytes=_adapter_bytes(settings))
    draft = draft_of(settings.scheduler.speculative_config, settings.model_path)
    if draft is not None:
        load = replace(load, draft_path=draft[0], draft_dtype=draft[1])
    if drafts_by_mtp(settings.scheduler.speculative_config):
        load = replace(load, draft_mtp=True)
    return load_backend(
        Path(settings.weights_path or settings.model_path),
        load,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        own_process=own_process,
        beside=beside or at_once,
    )


def _adapter_bytes(settings: EngineSettings) -> int:
    """Return the bytes for adapters."""
    from paceline.backends.machine.cpu import available_memory

    if settings.lora_bytes is not None:
        return settings.lora_bytes
    return available_memory() // _ADAPTER_SHARE


def _adapter_store(
    settings: EngineSettings, backend: ModelBackend, max_bytes: int
) -> AdapterStore | None:
    """Return what holds the engine's adapters; None without ``--enable-lora``. Raises ConfigError
    for a backend that has none."""
    from paceline.engine.adapters.interface import AdapterBackend, AdapterLimits
    from paceline.engine.adapters.store import AdapterStore

    if not settings.enable_lora:
        return None
    if not isinstance(backend, AdapterBackend) or backend.info.pooling is not None:
        raise ConfigError(
            f"--enable-lora: the backend {backend.info.name} has no adapters for this model"
        )
    if settings.lora_dtype == "int8" and backend.info.name == "torch":
        raise ConfigError("--lora-dtype int8 needs --compute native")
    if settings.lora_dtype == "int8" and backend.info.dtype in _FLOATS:
        # docs/lab-log/kernels.md: an adapter's own error is lost in that of weights of 8 bits
        raise ConfigError(
            f"--lora-dtype int8 loses more precision than weights in {backend.info.dtype} do: "
            "it is for --dtype int8, q4 and their like"
        )
    limits = AdapterLimits(
        max_bytes, settings.max_cpu_loras, settings.max_lora_rank, settings.lora_dtype
    )
    return AdapterStore(backend, limits)


def _keeper_maker(
    settings: EngineSettings, backend: ModelBackend
) -> Callable[[KVCacheManager], BlockKeeper] | None:
    """Return what makes the keeper of blocks outside the pool; None where none is asked for."""
    from paceline.engine.blocks.opening import BlockSettings, model_files, open_keeper

    if not settings.keeps_blocks:
        return None
    wanted = BlockSettings(
        folder=None if settings.kv_store is None else Path(settings.kv_store),
        max_bytes=settings.kv_store_bytes,
        port=settings.kv_port,
        host=settings.kv_host,
    )
    # the file that is read, which may be one in fewer bits
    weights = settings.weights_path or settings.model_path
    files = () if weights is None else model_files(Path(weights))
    return partial(open_keeper, backend=backend, settings=wanted, files=files)


def choose_max_model_len(
    wanted: int | None, info: BackendInfo, *, num_blocks: int | None = None
) -> int:
    """Return the longest request to admit: ``wanted``, or what model and KV cache allow.

    ``num_blocks`` overrides the pool's size. Raises ConfigError, with the numbers, when ``wanted``
    exceeds the model's positions or the whole pool. Uses the same function as admission.
    """
    blocks = info.num_blocks if num_blocks is None else num_blocks
    # a request's last token is sampled and never stored
    largest = min(info.max_model_len, blocks * info.block_size + 1)
    if wanted is None:
        return largest
    if wanted > info.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the model's {info.max_model_len} positions"
        )
    needed = blocks_for(wanted - 1, info.block_size)
    if needed > blocks:
        of_windows = info.num_window_blocks * info.window_block_bytes
        size = (needed * info.block_bytes + of_windows) / 2**20
        raise ConfigError(
            f"--max-model-len {wanted} needs {needed} KV blocks of {info.block_size} tokens "
            f"({size:.0f} MiB) and the pool has {blocks}: give "
            f"--kv-cache-memory {size:.0f}MiB or more, or "
            f"--max-model-len {largest} or less"
        )
    return wanted


def idle_blocks(settings: EngineSettings, info: BackendInfo) -> int | None:
    """Return the KV blocks that unused cached prefixes may keep: ``prefix_cache_bytes``, or, where
    memory is taken as it is used, the size of the model's files, at least 256 MiB. So a server
    takes a small multiple of its model, not all that the pool may grow to. None: any number."""
    from paceline.checkpoints.gguf.shards import weight_files

    size = settings.prefix_cache_bytes
    if size is None:
        if settings.model_path is None or info.device != "cpu":
            return None
        files = weight_files(Path(settings.weights_path or settings.model_path))
        size = max(_IDLE_BYTES, sum(file.stat().st_size for file in files))
    # an encoder's blocks take no memory
    block_bytes = info.block_bytes + info.window_block_bytes
    return size // block_bytes if block_bytes else None


def _pooled(
    scheduler: SchedulerConfig, pooling: PoolingInfo, settings: EngineSettings, max_model_len: int
) -> tuple[SchedulerConfig, int]:
    """Return the scheduler's settings for a pooled model, and its longest prompt.

    Raises ConfigError where prompts cannot be as long as was asked for.
    """
    if pooling.sees_all:
        # hidden states that are still needed are not in the KV cache
        scheduler = replace(scheduler, preemption="recompute")
    most = scheduler.max_num_batched_tokens
    if pooling.whole_prompts and max_model_len > most:
        if settings.load.max_model_len is not None:
            raise ConfigError(
                f"--max-model-len {max_model_len} exceeds --max-num-batched-tokens {most}, and "
                "this encoder computes a prompt in one step: raise the second or lower the first"
            )
        _log.warning(
            "max_model_len=%d: this encoder computes a prompt in one step, of at most %d tokens; "
            "--max-num-batched-tokens %d serves all its positions",
            most, most, max_model_len,
        )  # fmt: skip
        max_model_len = most
    return replace(
        scheduler,
        max_model_len=max_model_len,
        enable_chunked_prefill=not pooling.whole_prompts,
    ), max_model_len


def _whole_prompts(scheduler: SchedulerConfig, settings: EngineSettings, max_model_len: int) -> int:
    """Return the longest request where each prompt is computed in one step. Raises ConfigError
    where a longer one was asked for."""
    most = scheduler.max_num_batched_tokens
    if max_model_len <= most:
        return max_model_len
    if settings.load.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {max_model_len} exceeds --max-num-batched-tokens {most}, and "
            "--no-enable-chunked-prefill computes a prompt in one step: raise the second or lower "
            "the first"
        )
    _log.warning(
        "max_model_len=%d of %d: --no-enable-chunked-prefill computes a prompt in one step, of at "
        "most --max-num-batched-tokens %d", most, max_model_len, most,
    )  # fmt: skip
    return most


def build_core(
    settings: EngineSettings, *, own_process: bool = False
) -> tuple[EngineCore, EngineInfo]:
    """Return a loaded engine, ready to step, and its description. The caller closes the core.

    ``own_process``: see ``build_backend``.
    """
    from paceline.core.grammar import ConstrainedBackend
    from paceline.engine.core import EngineCore, EngineParts
    from paceline.engine.finished_answers import FinishedAnswers
    from paceline.engine.process.loop import engine_info
    from paceline.engine.recorder import FileRecorder, Recorder
    from paceline.engine.text.grammar import GrammarCompiler
    from paceline.timeline.tap import TimelineTap

    # raises errors before a model is loaded
    FinishedAnswers.of(settings.scheduler.speculative_config)
    load_policy(settings.scheduler.policy)
    if settings.enable_lora:
        # chosen once, before weights take memory
        settings = settings.changed(lora_bytes=_adapter_bytes(settings))
    backend = _built_backend(settings, own_process)
    try:
        info = backend.info
        max_model_len = choose_max_model_len(settings.load.max_model_len, info)
        scheduler, caches = settings.scheduler, settings.enable_prefix_caching
        if info.pooling is not None:
            scheduler, max_model_len = _pooled(scheduler, info.pooling, settings, max_model_len)
            caches = caches and not info.pooling.sees_all
        elif not scheduler.enable_chunked_prefill:
            max_model_len = _whole_prompts(scheduler, settings, max_model_len)
        scheduler = replace(scheduler, max_model_len=max_model_len)
        cache = CacheConfig(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            enable_prefix_caching=caches,
            max_idle_blocks=idle_blocks(settings, info),
            watermark=settings.watermark,
            num_host_blocks=info.num_host_blocks,
            swap_block_seconds=info.swap_block_seconds,
            window=info.window,
            num_window_blocks=info.num_window_blocks,
        )
        matchers = None
        if isinstance(backend, ConstrainedBackend):
            # loads the tokenizer with the first grammar
            matchers = GrammarCompiler(lambda: build_tokenizer(settings))
        depth = settings.pipeline_depth
        recorders: list[Recorder] = []
        if settings.record is not None:
            recorders.append(FileRecorder(Path(settings.record), scheduler, cache, depth))
        if settings.timeline:
            recorders.append(TimelineTap(scheduler, cache))
        parts = EngineParts(
            recorders=recorders,
            matchers=matchers,
            adapters=_adapter_store(settings, backend, settings.lora_bytes or 0),
            blocks=_keeper_maker(settings, backend),
        )
        core = EngineCore(backend, scheduler, cache, pipeline_depth=depth, parts=parts)
        if settings.turn is not None:
            core.turn = _take_turns(backend, settings.turn, settings.turn_weight)
    except BaseException:
        backend.close()
        raise
    return core, engine_info(core, settings.model_name)


def _built_backend(settings: EngineSettings, own_process: bool) -> ModelBackend:
    """Build the backend; next to other engines its load yields to their steps."""
    if settings.turn is None:
        return build_backend(settings, own_process=own_process)
    from paceline.backends.machine.yielding import yielding
    from paceline.engine.models.loading import Loading

    with Loading(Path(settings.turn)) as loading:
        beside = cast("Beside", partial(yielding, is_crowded=loading.is_crowded))
        return build_backend(settings, own_process=own_process, beside=beside)


def _take_turns(backend: ModelBackend, page: str, weight: float) -> Sharing | None:
    """Have a backend compute in turns with the other engines of its server; None: on a device of
    its own it needs none."""
    from paceline.engine.models.turn import SharingBackend, Turn

    if backend.info.device != "cpu" or not isinstance(backend, SharingBackend):
        return None
    turn = Turn(Path(page), weight)
    turn.serve(backend)
    return turn


def build_tokenizer(settings: EngineSettings) -> Tokenizer:
    """Return the model's tokenizer; the null backend's works on bytes."""
    if settings.model_path is None:
        from paceline.engine.testing import ByteTokenizer

        return ByteTokenizer()
    from paceline.engine.text.tokenizer import load_tokenizer

    return load_tokenizer(Path(settings.tokenizer or settings.model_path), settings.chat_template)


def default_sampling(settings: EngineSettings) -> dict[str, float]:
    """Return the sampling fields of requests that leave them out: what the catalogue knows of an
    alias, or what the checkpoint says (generation_config.json, a GGUF file's general.sampling
    keys). ``generation_config`` names another folder, or "vllm" for none of them;
    ``override_generation_config`` wins.

    Raises CheckpointError or ConfigError for a malformed file.
    """
    from paceline.server.settings.config import SAMPLING_DEFAULTS, sampling_defaults

    own = settings.override_generation_config
    if unknown := sorted(set(own) - set(SAMPLING_DEFAULTS)):
        raise ConfigError(
            f"--override-generation-config does not know {', '.join(unknown)}; it sets "
            f"{', '.join(SAMPLING_DEFAULTS)}"
        )
    return sampling_defaults(_generation_config(settings) | own)


def _generation_config(settings: EngineSettings) -> dict[str, Any]:
    from paceline.checkpoints.gguf.sampling import sampling_keys
    from paceline.checkpoints.model.json_file import read_json_object

    chosen, model = settings.generation_config, settings.model_path
    if chosen == "vllm" or (chosen == "auto" and model is None):
        return {}
    if chosen == "auto" and model is not None and not Path(model).is_dir():
        # a model of the catalogue is one known file
        alias = ALIASES.get(settings.model_name)
        return dict(alias.sampling) if alias is not None else sampling_keys(Path(model))
    folder = Path(model if chosen == "auto" and model is not None else chosen)
    found = read_json_object(folder / "generation_config.json")
    if found is None and chosen != "auto":
        raise ConfigError(f"--generation-config {chosen}: no generation_config.json is there")
    return dict(found or {})
