"""The way in: a checkpoint to a backend, by the compute path that suits machine and model.

PyTorch is imported only where it computes, or where only it can say whether there is a device to
compute on: it takes a second and 200 MB to load.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from paceline.backends.devices import choose_device
from paceline.backends.drafting import DraftModel, DraftPlan
from paceline.backends.formats import Formats, choose_formats
from paceline.backends.head_load import choose_head
from paceline.backends.machine import (
    NO_TORCH,
    available_memory,
    choose_num_blocks,
    has_torch,
)
from paceline.backends.native import OWN_BITS, choose_kinds
from paceline.backends.native.packed import PackedCopies, fingerprint
from paceline.backends.placement import Placement, choose_placement
from paceline.backends.pooling.load import load_head, pooling_info
from paceline.backends.pooling.runner import HiddenModel, PoolingRunner
from paceline.backends.rope import longest_sequence
from paceline.backends.runner import ModelRunner
from paceline.backends.settings import BackendSettings
from paceline.backends.steps import LoadedModel, ModelLoader
from paceline.backends.topology import bind, format_list
from paceline.backends.worker import Runner, WorkerBackend
from paceline.checkpoints.base import Checkpoint, open_checkpoint
from paceline.checkpoints.config import ModelConfig
from paceline.checkpoints.eagle3 import is_eagle3
from paceline.checkpoints.encoder import ENCODERS, EncoderCheckpoint, EncoderFiles
from paceline.checkpoints.gguf import GGUFCheckpoint
from paceline.checkpoints.gguf_encoder import GGUFEncoder
from paceline.checkpoints.gguf_parts import read_gguf_parts
from paceline.checkpoints.hf import HFCheckpoint
from paceline.checkpoints.pooling import PoolingFiles, find_pooling
from paceline.core.backend import BackendInfo
from paceline.core.errors import ConfigError
from paceline.core.pooling import EMBED

__all__ = ["load_backend"]

_log = logging.getLogger(__name__)

# formats of weights beside which the head is, or may be, int8
_SCREENED: Final = ("int8", "q4", OWN_BITS)


def load_backend(
    checkpoint_path: Path,
    settings: BackendSettings,
    *,
    max_num_seqs: int = 256,
    own_process: bool = False,
) -> WorkerBackend:
    """Open a checkpoint and get ready to run plans.

    Args:
        checkpoint_path: a Hugging Face folder or a .gguf file.
        max_num_seqs: requests that run at once; sizes buffers, more are possible.
        own_process: this process is there for the backend, so all its threads go to the nodes; else
            only those that compute do, which is none of the caller's.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: settings that the model or the machine cannot do.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    return WorkerBackend(lambda: _load(checkpoint_path, settings, max_num_seqs, own_process))


def _load(
    checkpoint_path: Path, settings: BackendSettings, max_num_seqs: int, own_process: bool
) -> tuple[Runner, BackendInfo]:
    """On the thread that will compute."""
    started = time.monotonic()
    parts = read_gguf_parts(checkpoint_path) if checkpoint_path.is_file() else None
    metadata = None if parts is None else parts[0].metadata
    pooling = find_pooling(checkpoint_path, settings.runner, settings.convert, metadata)
    if pooling is not None and settings.draft_path is not None:
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
    # before weights are packed and threads started, which then come to lie on the nodes
    placement = _bound(_placed(settings, device), whole_process=own_process)
    formats = choose_formats(
        config,
        compute=settings.compute,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        device=device,
        torch_dtype=partial(_torch_dtype, device=device),
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
    loader = _choose_loader(
        checkpoint,
        formats,
        device=device,
        block_size=settings.block_size,
        max_model_len=length,
        threads=placement.threads,
        screen_head=settings.screen_head,
        pooling=pooling,
        copies=_copies(checkpoint_path, formats, settings.packed_cache_bytes),
    )
    draft = None
    if settings.draft_path is not None:
        draft = _choose_draft(
            settings, checkpoint_path, config, formats, device, length, placement.threads
        )
    beside = 0 if draft is None else draft.block_bytes
    blocks, host_blocks = _choose_sizes(loader, settings, max_num_seqs, length, beside)
    chosen = time.monotonic()
    loaded = loader.load(blocks, host_blocks)
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
        block_bytes=loader.block_bytes + beside,
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
                    placement.describe(settings.threads),
                ),
            )
        ),
        numa_nodes=placement.nodes,
        num_host_blocks=host_blocks,
        swap_block_seconds=loaded.swap_block_seconds,
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
    """An encoder, which has no KV cache: its blocks are numbers, so many that the scheduler never
    waits for one."""
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
        # they are small, and their vectors are compared in all their digits
        dtype = "float32"
    dtype = _torch_dtype(dtype, device=device)
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
    """For the ready line: what became of a folder's quantised weights."""
    kind = checkpoint.quantisation if isinstance(checkpoint, HFCheckpoint) else ""
    if not kind:
        return ""
    return f"{kind} as blocks of Q4_1" if in_bits else f"{kind} decoded to {formats.dtype}"


def _described(pooling: PoolingFiles) -> str:
    """For the ready line: what requests get, and where that is written."""
    what = "embeddings" if pooling.task == EMBED else "classes"
    return f"{what} by {pooling.pooling} pooling, {pooling.activation} last ({pooling.why})"


def _choose_length(longest: int, wanted: int | None, usual: int | None) -> int:
    """Positions to serve: ``wanted``, else as many as the model has, but no more than is ``usual``.
    Raises ConfigError where the model has fewer."""
    length = min(longest, usual or longest) if wanted is None else wanted
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len={length} is not in 1 to {longest}, the model's positions")
    return length


def _placed(settings: BackendSettings, device: str) -> Placement:
    """Where to compute; with ``numa_fallback`` as auto would where ``numa`` cannot be had."""
    # a GPU has a node of its own, which is not asked here
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
    """Carry out a placement, as far as the system lets us: what it became."""
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
    """Raises ConfigError where the cosines and sines of so many positions take all memory: a file
    may claim any number of them."""
    needed, free = 4 * config.head_dim * length, available_memory()
    if needed > free:
        raise ConfigError(
            f"the rotary tables of {length} positions take {needed >> 20} MiB, and {free >> 20} "
            "MiB of memory are free: choose a smaller max_model_len"
        )


def _torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))


def _copies(path: Path, formats: Formats, max_bytes: int | None) -> PackedCopies | None:
    if max_bytes is None:
        return None
    if formats.compute != "native":
        raise ConfigError(
            f"--packed-cache changes nothing with {formats.compute} compute, which packs no weights"
        )
    # which can fetch models, and brings all that this takes
    from paceline.checkpoints.resolve import default_cache_dir

    return PackedCopies(default_cache_dir() / "packed", max_bytes, fingerprint(path))


def _choose_loader(
    checkpoint: Checkpoint,
    formats: Formats,
    *,
    device: str,
    block_size: int,
    max_model_len: int,
    threads: int,
    screen_head: bool,
    pooling: PoolingFiles | None,
    copies: PackedCopies | None,
) -> ModelLoader:
    if screen_head and (formats.compute != "native" or formats.dtype not in _SCREENED):
        raise ConfigError(
            f"--screen-head changes nothing with {formats.compute} compute and {formats.dtype} "
            f"weights: it is for native compute with {', '.join(_SCREENED)}"
        )
    if formats.compute == "native":
        from paceline.backends.native.step import NativeLoader

        return NativeLoader(
            checkpoint=checkpoint,
            dtype=formats.dtype,
            kv_dtype=formats.kv_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            threads=threads,
            isa=formats.isa,
            screen_head=screen_head,
            has_head=pooling is None,
            copies=copies,
        )
    from paceline.backends.torch.load import TorchLoader

    return TorchLoader(
        checkpoint=checkpoint,
        dtype=formats.dtype,
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        threads=threads,
        has_head=pooling is None,
    )


def _choose_draft(
    settings: BackendSettings,
    checkpoint_path: Path,
    config: ModelConfig,
    formats: Formats,
    device: str,
    length: int,
    threads: int,
) -> DraftPlan:
    """Raises ConfigError for one that cannot guess for the model of ``config``."""
    assert settings.draft_path is not None
    path = Path(settings.draft_path)
    if is_eagle3(path):
        return choose_head(settings, config, formats, device, length)
    itself = path.resolve() == checkpoint_path.resolve()
    checkpoint = open_checkpoint(path)
    own = checkpoint.config
    if own.vocab_size != config.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {path} has {own.vocab_size} tokens and the "
            f"served one {config.vocab_size}: both must have the same vocabulary"
        )
    mirrors = itself and formats.compute == "native"
    try:
        found = choose_formats(
            own,
            compute="native" if mirrors else settings.compute,
            dtype=settings.draft_dtype,
            # a copy of the other's has its format
            kv_dtype=formats.kv_dtype if mirrors else "auto",
            block_size=settings.block_size,
            device=device,
            torch_dtype=partial(_torch_dtype, device=device),
            isa=formats.isa if mirrors else settings.isa,
        )
    except ConfigError as error:
        raise ConfigError(f"speculative_config: the draft model {path}: {error}") from error
    if itself and (found.compute, found.dtype) == (formats.compute, formats.dtype):
        raise ConfigError(
            f"speculative_config: the model is served in {formats.dtype}, and its guesses would be "
            f"made in {found.dtype}: each would cost what a token does. Serve it in more bits "
            "(--dtype bfloat16) or leave its guesses out"
        )
    if longest_sequence(own) < length:
        raise ConfigError(
            f"speculative_config: the draft model {path} has {longest_sequence(own)} positions and "
            f"a request may have {length}: give --max-model-len {longest_sequence(own)} or less"
        )
    loader = _choose_loader(
        checkpoint,
        found,
        device=device,
        block_size=settings.block_size,
        max_model_len=length,
        threads=threads,
        # a guess may be wrong
        screen_head=found.compute == "native" and found.dtype in ("int8", "q4"),
        pooling=None,
        copies=_copies(path, found, settings.packed_cache_bytes),
    )
    return DraftPlan(
        loader.block_bytes,
        f"guesses by {'itself' if itself else path.name} in {found.dtype}, {found.compute}",
        partial(_load_draft, loader, settings.block_size, mirrors),
    )


def _load_draft(
    loader: ModelLoader, block_size: int, mirrors: bool, served: LoadedModel, num_blocks: int
) -> tuple[LoadedModel, DraftModel]:
    """``mirrors``: its KV cache is a copy of the served model's."""
    loaded = loader.load(num_blocks, 0)
    mirror = None
    if mirrors:
        from paceline.backends.native.step import NativeStep

        assert isinstance(loaded.model, NativeStep) and isinstance(served.model, NativeStep)
        mirror = partial(loaded.model.mirror, served.model)
    return served, DraftModel(loaded, num_blocks=num_blocks, block_size=block_size, mirror=mirror)


def _choose_sizes(
    loader: ModelLoader,
    settings: BackendSettings,
    max_num_seqs: int,
    max_model_len: int,
    beside: int,
) -> tuple[int, int]:
    """Blocks of the KV pool and of the memory to swap to; for each of the pool's, ``beside`` bytes
    are taken by the draft model."""
    block_bytes, num_blocks = loader.block_bytes, settings.num_blocks
    if not block_bytes:
        # without a cache blocks are numbers, so many that no prompt waits for one
        return num_blocks or max_num_seqs * -(-max_model_len // settings.block_size), 0
    if num_blocks is None:
        free_bytes, share = loader.pool_memory()
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
