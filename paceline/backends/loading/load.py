"""Loading of a checkpoint into a backend, on the compute path that suits machine and model.

PyTorch is imported only where it computes, or where only it can tell whether a device exists: it
takes a second and 200 MB to load.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.backends.drafting.draft_model import DraftPlan
from paceline.backends.loading.devices import choose_device
from paceline.backends.loading.draft import choose_draft
from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.loading.plan import LoadPlan, choose_loader, torch_dtype
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.loading.windows import WindowChoice, choose_windows
from paceline.backends.machine.cpu import NO_TORCH, available_memory, choose_num_blocks, has_torch
from paceline.backends.machine.placement import Placement, choose_placement
from paceline.backends.machine.topology import bind, format_list
from paceline.backends.native import Kinds, choose_kinds
from paceline.backends.pooling.load import load_head, pooling_info
from paceline.backends.pooling.runner import HiddenModel, PoolingRunner
from paceline.backends.runner.interface import ModelLoader
from paceline.backends.runner.model_runner import ModelRunner
from paceline.backends.runner.rope import longest_sequence
from paceline.backends.runner.worker_thread import Runner, WorkerBackend
from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from paceline.checkpoints.gguf.encoder import GGUFEncoder
from paceline.checkpoints.gguf.shards import read_gguf_parts
from paceline.checkpoints.heads.pooling import PoolingFiles, find_pooling
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.hf.encoder import ENCODERS, EncoderCheckpoint, EncoderFiles
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import open_checkpoint
from paceline.core.backend import BackendInfo
from paceline.core.pooling import EMBED
from paceline.errors import ConfigError

__all__ = ["load_backend"]

_log = logging.getLogger(__name__)


def load_backend(
    checkpoint_path: Path,
    settings: BackendSettings,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    own_process: bool = False,
) -> WorkerBackend:
    """Open a checkpoint and get ready to run plans.

    Args:
        checkpoint_path: a Hugging Face folder or a .gguf file.
        max_num_seqs: requests that run at once; sizes buffers, and window blocks.
        max_num_batched_tokens: tokens of a step; sizes window blocks.
        own_process: this process runs only the backend, so all its threads are bound to the nodes;
            else only the threads that compute, which exclude the caller's.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: settings that the model or the machine does not support.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    limits = max_num_seqs, max_num_batched_tokens
    return WorkerBackend(lambda: _load(checkpoint_path, settings, limits, own_process))


def _load(
    path: Path, settings: BackendSettings, limits: tuple[int, int], own_process: bool
) -> tuple[Runner, BackendInfo]:
    """Load the model on the thread that will compute: open it, settle its plan, size its memory,
    read its weights."""
    started = time.monotonic()
    checkpoint, pooling = _open(path, settings)
    if isinstance(checkpoint, EncoderCheckpoint | GGUFEncoder):
        assert pooling is not None
        return _load_encoder(checkpoint, pooling, settings, limits[0], own_process)
    opened = time.monotonic()
    usual = None if pooling is None else pooling.max_seq_length
    length = _choose_length(longest_sequence(checkpoint.config), settings.max_model_len, usual)
    _check_positions(checkpoint.config, length)
    device = choose_device(settings.device)
    # before weights are packed and threads started, so that both lie on the chosen nodes
    placement = _bound(_placed(settings, device), whole_process=own_process)
    plan = LoadPlan(
        path=path,
        checkpoint=checkpoint,
        pooling=pooling,
        settings=settings,
        limits=limits,
        max_model_len=length,
        device=device,
        placement=placement,
        formats=_choose_formats(checkpoint.config, settings, device, pooled=pooling is not None),
    )
    weights = _describe_weights(plan)
    loader = choose_loader(plan)
    draft = choose_draft(plan) if settings.drafts else None
    sizes, host_blocks = _size(plan, loader, draft)
    chosen = time.monotonic()
    loaded = loader.load(sizes.num_blocks, host_blocks, sizes.num_window_blocks)
    _log.info(
        "loaded checkpoint=%.2f choice=%.2f weights=%.2f",
        opened - started, chosen - opened, time.monotonic() - chosen,
    )  # fmt: skip
    drafting = None
    if draft is not None:
        loaded, drafting = draft.load(loaded, sizes.num_blocks)
    info = replace(
        _describe(plan, loader, draft, sizes, weights),
        num_host_blocks=host_blocks,
        swap_block_seconds=loaded.swap_block_seconds,
    )
    if pooling is not None:
        assert isinstance(loaded.model, HiddenModel)
        return _pooled(loaded.model, checkpoint, pooling, settings, info)
    runner = ModelRunner(
        loaded,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        max_num_seqs=limits[0],
        max_model_len=length,
        draft=drafting,
    )
    return runner, info


def _open(
    path: Path, settings: BackendSettings
) -> tuple[Checkpoint | EncoderCheckpoint | GGUFEncoder, PoolingFiles | None]:
    """Open a model's files, and return how it is pooled; None: it generates."""
    parts = read_gguf_parts(path) if path.is_file() else None
    metadata = None if parts is None else parts[0].metadata
    pooling = find_pooling(path, settings.runner, settings.convert, metadata)
    if pooling is not None and settings.drafts:
        raise ConfigError("speculative_config: a model that is pooled makes no tokens to guess")
    if pooling is not None and pooling.encoder in ENCODERS:
        return EncoderCheckpoint(path) if parts is None else GGUFEncoder(*parts), pooling
    if parts is None:
        return open_checkpoint(path), pooling
    checkpoint = GGUFCheckpoint(path, parts)
    checkpoint.forget_vocabulary()
    return checkpoint, pooling


def _choose_formats(
    config: ModelConfig, settings: BackendSettings, device: str, *, pooled: bool
) -> Formats:
    """Return the formats that are asked for, or suit the machine and the file."""
    formats = choose_formats(
        config,
        compute=settings.compute,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        device=device,
        torch_dtype=partial(torch_dtype, device=device),
        isa=settings.isa,
        pooled=pooled,
    )
    _log.info(
        "compute=%s dtype=%s kv_dtype=%s%s",
        formats.compute, formats.dtype, formats.kv_dtype, formats.why and f": {formats.why}",
    )  # fmt: skip
    return formats


def _describe_weights(plan: LoadPlan) -> str:
    """Return, for the ready line, how the matrices of a file of few bits are kept."""
    formats, checkpoint = plan.formats, plan.checkpoint
    kinds = Kinds()
    if formats.compute == "native":
        kinds = choose_kinds(checkpoint, formats.dtype)
    folder = checkpoint.quantisation if isinstance(checkpoint, HFCheckpoint) else ""
    if folder:
        in_bits = "as blocks of Q4_1" if kinds.numbers else f"decoded to {formats.dtype}"
        folder = f"{folder} {in_bits}"
    return "; ".join(filter(None, (folder, kinds.note)))


def _size(plan: LoadPlan, loader: ModelLoader, draft: DraftPlan | None) -> tuple[WindowChoice, int]:
    """Return the blocks of the KV pool, and those of host memory to swap to."""
    settings, length = plan.settings, plan.max_model_len
    # asked once: a second answer may differ
    memory = loader.pool_memory()
    blocks, host_blocks = _choose_sizes(loader, settings, plan.limits[0], length, memory, draft)
    windows = choose_windows(
        loader, settings, plan.limits, length, blocks, memory,
        pooled=plan.pooling is not None, drafted=draft is not None,
    )  # fmt: skip
    return windows, 0 if windows.num_window_blocks else host_blocks


def _pooled(
    model: HiddenModel,
    checkpoint: Checkpoint | EncoderFiles,
    pooling: PoolingFiles,
    settings: BackendSettings,
    info: BackendInfo,
) -> tuple[Runner, BackendInfo]:
    """Load the layers behind a model whose hidden states are pooled."""
    head = load_head(pooling, checkpoint, checkpoint.config.hidden_size)
    vectors = pooling_info(pooling, head, settings.matryoshka_dimensions)
    runner = PoolingRunner(
        model, head, vectors, vocab_size=info.vocab_size, block_size=info.block_size
    )
    return runner, replace(info, pooling=vectors)


def _describe(
    plan: LoadPlan, loader: ModelLoader, draft: DraftPlan | None, sizes: WindowChoice, weights: str
) -> BackendInfo:
    """Describe the backend, without what is known only once it is loaded."""
    formats, windowed = plan.formats, sizes.num_window_blocks > 0
    drafter = "" if draft is None else draft.described
    window_block_bytes = loader.window_block_bytes if windowed else 0
    choice = (
        "" if plan.pooling is None else _described(plan.pooling),
        formats.why,
        weights,
        drafter,
        sizes.why,
        plan.placement.describe(plan.settings.threads),
    )
    return BackendInfo(
        name=formats.compute,
        vocab_size=plan.checkpoint.config.vocab_size,
        max_model_len=plan.max_model_len,
        block_size=plan.settings.block_size,
        num_blocks=sizes.num_blocks,
        block_bytes=loader.block_bytes
        + (0 if draft is None else draft.block_bytes)
        - window_block_bytes,
        dtype=formats.dtype,
        device=plan.device,
        kv_dtype=formats.kv_dtype,
        choice="; ".join(filter(None, choice)),
        numa_nodes=plan.placement.nodes,
        window=loader.window if windowed else 0,
        num_window_blocks=sizes.num_window_blocks,
        window_block_bytes=window_block_bytes,
        drafter=drafter,
    )


def _load_encoder(
    checkpoint: EncoderFiles,
    pooling: PoolingFiles,
    settings: BackendSettings,
    max_num_seqs: int,
    own: bool,
) -> tuple[Runner, BackendInfo]:
    """Load an encoder. It has no KV cache: its blocks are mere numbers, enough of them that the
    scheduler never waits for one."""
    started = time.monotonic()
    path, config = checkpoint.path, checkpoint.config
    length = _choose_length(config.longest, settings.max_model_len, pooling.max_seq_length)
    for flag, value in (("kv-dtype", settings.kv_dtype), ("compute", settings.compute)):
        if value not in ("auto", "torch"):
            raise ConfigError(
                f"--{flag} {value} is for decoders, and {path} is an encoder "
                f"({config.model_type}), which PyTorch computes without a KV cache: leave it out"
            )
    if settings.kv_cache_bytes is not None:
        raise ConfigError(f"{path} is an encoder without a KV cache: leave out --kv-cache-memory")
    if not has_torch():
        raise ConfigError(f"{path} is an encoder, which PyTorch computes, and {NO_TORCH}")
    device = choose_device(settings.device)
    placement = _bound(_placed(settings, device), whole_process=own)
    from paceline.backends.torch.encoder import load_encoder

    dtype = settings.dtype
    if dtype == "auto" and device == "cpu":
        # encoders are small, and their vectors are compared in all their digits
        dtype = "float32"
    dtype = torch_dtype(dtype, device=device)
    model = load_encoder(checkpoint, dtype=dtype, device=device, threads=placement.threads)
    _log.info("loaded encoder=%.2f", time.monotonic() - started)
    info = BackendInfo(
        name="torch",
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks or max_num_seqs * -(-length // settings.block_size),
        block_bytes=0,
        dtype=dtype,
        device=device,
        choice="; ".join(filter(None, (_described(pooling), placement.describe(settings.threads)))),
        numa_nodes=placement.nodes,
    )
    return _pooled(model, checkpoint, pooling, settings, info)


def _described(pooling: PoolingFiles) -> str:
    """Return, for the ready line, what requests get and which file says so."""
    what = "embeddings" if pooling.task == EMBED else "classes"
    return f"{what} by {pooling.pooling} pooling, {pooling.activation} last ({pooling.why})"


def _choose_length(longest: int, wanted: int | None, usual: int | None) -> int:
    """Return the positions to serve: ``wanted``, else the model's number, at most ``usual``.
    Raises ConfigError where the model has fewer."""
    length = min(longest, usual or longest) if wanted is None else wanted
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len={length} is not in 1 to {longest}, the model's positions")
    return length


def _placed(settings: BackendSettings, device: str) -> Placement:
    """Choose where to compute; ``numa_fallback`` takes "auto" where ``numa`` is unavailable."""
    # a GPU has a node of its own, which is not looked up here
    auto = "auto" if device == "cpu" else "off"
    try:
        nodes = auto if settings.numa == "auto" else settings.numa
        return choose_placement(settings.threads, nodes)
    except ConfigError as error:
        if not settings.numa_fallback:
            raise
        _log.warning("numa_fallback numa=%s reason=%s", settings.numa, error)
    return choose_placement(settings.threads, auto)


def _bound(placement: Placement, *, whole_process: bool) -> Placement:
    """Apply a placement as far as the system allows it, and return the result."""
    if placement.cpus is None:
        if placement.why:
            _log.info("threads=%d numa_nodes=none: %s", placement.threads, placement.why)
        return placement
    cpus = format_list(placement.cpus)
    refusal = bind(placement.cpus, whole_process=whole_process)
    if refusal:
        _log.warning(
            "numa_unbound threads=%d numa_nodes=%s cpus=%s reason=%s",
            placement.threads, placement.nodes or "none", cpus, refusal,
        )  # fmt: skip
        why = f"NUMA nodes {placement.nodes} could not be bound to ({refusal})"
        if placement.why:
            why = f"{placement.why}, but it could not be bound ({refusal})"
        return replace(placement, nodes="", cpus=None, why=why)
    _log.info(
        "threads=%d numa_nodes=%s cpus=%s%s",
        placement.threads, placement.nodes or "none", cpus, placement.why and f": {placement.why}",
    )  # fmt: skip
    return placement


def _check_positions(config: ModelConfig, length: int) -> None:
    """Raise ConfigError where the cosines and sines of ``length`` positions take all memory: a file
    may claim any number of them."""
    needed, free = 4 * config.head_dim * length, available_memory()
    if needed > free:
        raise ConfigError(
            f"the rotary tables of {length} positions take {needed >> 20} MiB, and {free >> 20} "
            "MiB of memory are free: choose a smaller max_model_len"
        )


def _choose_sizes(
    loader: ModelLoader,
    settings: BackendSettings,
    max_num_seqs: int,
    max_model_len: int,
    memory: tuple[int, float],
    draft: DraftPlan | None,
) -> tuple[int, int]:
    """Return the blocks of the KV pool and of host memory for swapping, after the draft model's
    blocks and weights are deducted."""
    block_bytes, num_blocks = loader.block_bytes, settings.num_blocks
    if not block_bytes:
        # without a cache, blocks are numbers: enough of them that no prompt waits for one
        return num_blocks or max_num_seqs * -(-max_model_len // settings.block_size), 0
    if num_blocks is None:
        free_bytes, share = memory
        beside = 0
        if draft is not None:
            beside = draft.block_bytes
            free_bytes = max(0, free_bytes - draft.weight_bytes)
        num_blocks = choose_num_blocks(
            settings.kv_cache_bytes,
            block_bytes=block_bytes + beside,
            block_size=settings.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=free_bytes,
            share=share,
        )
    swap_bytes = settings.swap_bytes
    if swap_bytes is None:
        # the limit may be infinity, which cannot be divided into blocks
        swap_bytes = int(min(num_blocks * block_bytes // 2, loader.max_host_bytes))
    return num_blocks, swap_bytes // block_bytes
