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
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.loading.target import choose_copies, choose_loader, torch_dtype
from paceline.backends.loading.windows import choose_windows
from paceline.backends.machine.cpu import NO_TORCH, available_memory, choose_num_blocks, has_torch
from paceline.backends.machine.placement import Placement, choose_placement
from paceline.backends.machine.topology import bind, format_list
from paceline.backends.native import choose_kinds
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
    checkpoint_path: Path,
    settings: BackendSettings,
    limits: tuple[int, int],
    own_process: bool,
) -> tuple[Runner, BackendInfo]:
    """Load the model on the thread that will compute."""
    started, max_num_seqs = time.monotonic(), limits[0]
    parts = read_gguf_parts(checkpoint_path) if checkpoint_path.is_file() else None
    metadata = None if parts is None else parts[0].metadata
    pooling = find_pooling(checkpoint_path, settings.runner, settings.convert, metadata)
    if pooling is not None and settings.drafts:
        raise ConfigError("speculative_config: a model that is pooled makes no tokens to guess")
    if pooling is not None and pooling.encoder in ENCODERS:
        encoder = EncoderCheckpoint(checkpoint_path) if parts is None else GGUFEncoder(*parts)
        return _load_encoder(encoder, pooling, settings, max_num_seqs, own_process)
    checkpoint = (
        open_checkpoint(checkpoint_path)
        if parts is None
        else GGUFCheckpoint(checkpoint_path, parts)
    )
    if isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.forget_vocabulary()
    opened = time.monotonic()
    config = checkpoint.config
    usual = None if pooling is None else pooling.max_seq_length
    length = _choose_length(longest_sequence(config), settings.max_model_len, usual)
    _check_positions(config, length)
    device = choose_device(settings.device)
    # before weights are packed and threads started, so that both lie on the chosen nodes
    placement = _bound(_placed(settings, device), whole_process=own_process)
    formats = choose_formats(
        config,
        compute=settings.compute,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        device=device,
        torch_dtype=partial(torch_dtype, device=device),
        isa=settings.isa,
        pooled=pooling is not None,
    )
    _log.info(
        "compute=%s dtype=%s kv_dtype=%s%s",
        formats.compute, formats.dtype, formats.kv_dtype, formats.why and f": {formats.why}",
    )  # fmt: skip
    kinds, in_bits = "", False
    if formats.compute == "native":
        found = choose_kinds(checkpoint, formats.dtype, screen_head=settings.screen_head)
        kinds, in_bits = found.note, bool(found.numbers)
    loader = choose_loader(
        checkpoint,
        formats,
        device=device,
        block_size=settings.block_size,
        max_model_len=length,
        threads=placement.threads,
        screen_head=settings.screen_head,
        pooling=pooling,
        copies=choose_copies(checkpoint_path, formats, settings.packed_cache_bytes),
    )
    draft = None
    if settings.drafts:
        draft = choose_draft(
            settings, checkpoint_path, checkpoint, formats, device, length, placement.threads
        )
    # asked once: a second answer may differ
    memory = loader.pool_memory()
    blocks, host_blocks = _choose_sizes(loader, settings, max_num_seqs, length, memory, draft)
    windows = choose_windows(
        loader, settings, limits, length, blocks, memory,
        pooled=pooling is not None, drafted=draft is not None,
    )  # fmt: skip
    blocks, host_blocks = windows.num_blocks, 0 if windows.num_window_blocks else host_blocks
    chosen = time.monotonic()
    loaded = loader.load(blocks, host_blocks, windows.num_window_blocks)
    _log.info(
        "loaded checkpoint=%.2f choice=%.2f weights=%.2f",
        opened - started, chosen - opened, time.monotonic() - chosen,
    )  # fmt: skip
    drafting = None
    if draft is not None:
        loaded, drafting = draft.load(loaded, blocks)
    runner: Runner
    pooled = None
    if pooling is None:
        runner = ModelRunner(
            loaded,
            vocab_size=config.vocab_size,
            block_size=settings.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            draft=drafting,
        )
    else:
        assert isinstance(loaded.model, HiddenModel)
        head = load_head(pooling, checkpoint, config.hidden_size)
        pooled = pooling_info(pooling, head, settings.matryoshka_dimensions)
        runner = PoolingRunner(
            loaded.model, head, pooled, vocab_size=config.vocab_size, block_size=settings.block_size
        )
    info = BackendInfo(
        name=formats.compute,
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=settings.block_size,
        num_blocks=blocks,
        block_bytes=loader.block_bytes
        + (0 if draft is None else draft.block_bytes)
        - (loader.window_block_bytes if windows.num_window_blocks else 0),
        dtype=formats.dtype,
        device=device,
        kv_dtype=formats.kv_dtype,
        choice="; ".join(
            filter(
                None,
                (
                    "" if pooling is None else _described(pooling),
                    formats.why,
                    _decoded(checkpoint, formats, in_bits),
                    kinds,
                    "" if draft is None else draft.described,
                    windows.why,
                    placement.describe(settings.threads),
                ),
            )
        ),
        numa_nodes=placement.nodes,
        num_host_blocks=host_blocks,
        swap_block_seconds=loaded.swap_block_seconds,
        window=loader.window if windows.num_window_blocks else 0,
        num_window_blocks=windows.num_window_blocks,
        window_block_bytes=loader.window_block_bytes if windows.num_window_blocks else 0,
        drafter="" if draft is None else draft.described,
        pooling=pooled,
    )
    return runner, info


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
    head = load_head(pooling, checkpoint, config.hidden_size)
    _log.info("loaded encoder=%.2f", time.monotonic() - started)
    pooled = pooling_info(pooling, head, settings.matryoshka_dimensions)
    blocks = settings.num_blocks or max_num_seqs * -(-length // settings.block_size)
    runner = PoolingRunner(
        model, head, pooled, vocab_size=config.vocab_size, block_size=settings.block_size
    )
    info = BackendInfo(
        name="torch",
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=settings.block_size,
        num_blocks=blocks,
        block_bytes=0,
        dtype=dtype,
        device=device,
        choice="; ".join(filter(None, (_described(pooling), placement.describe(settings.threads)))),
        numa_nodes=placement.nodes,
        pooling=pooled,
    )
    return runner, info


def _decoded(checkpoint: Checkpoint, formats: Formats, in_bits: bool) -> str:
    """Return, for the ready line, how a folder's quantised weights are kept."""
    kind = checkpoint.quantisation if isinstance(checkpoint, HFCheckpoint) else ""
    if not kind:
        return ""
    return f"{kind} as blocks of Q4_1" if in_bits else f"{kind} decoded to {formats.dtype}"


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
