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

from paceline.backends.formats import Formats, choose_formats
from paceline.backends.machine import available_memory, choose_num_blocks, may_have_cuda
from paceline.backends.placement import Placement, choose_placement
from paceline.backends.rope import longest_sequence
from paceline.backends.runner import ModelRunner
from paceline.backends.steps import ModelLoader
from paceline.backends.topology import bind, format_list
from paceline.backends.worker import WorkerBackend
from paceline.checkpoints.base import Checkpoint, open_checkpoint
from paceline.checkpoints.config import ModelConfig
from paceline.core.backend import BackendInfo
from paceline.core.errors import ConfigError

__all__ = ["load_backend"]

_log = logging.getLogger(__name__)


def load_backend(
    checkpoint_path: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    threads: int | None = None,
    numa: str = "auto",
    numa_fallback: bool = False,
    own_process: bool = False,
    compute: str = "torch",
    isa: str | None = None,
    swap_bytes: int | None = None,
) -> WorkerBackend:
    """Open a checkpoint and get ready to run plans.

    Args:
        checkpoint_path: a Hugging Face folder or a .gguf file.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32" or "bfloat16"; of weights and activations.
        kv_dtype: "auto", "float32", "bfloat16" or "int8"; of the KV cache. What is not the
            weights' own dtype needs native compute.
        block_size: tokens per KV block.
        num_blocks: the KV pool's size; None: as ``kv_cache_bytes`` says.
        kv_cache_bytes: the KV pool's size at most; None: see ``machine.choose_num_blocks``.
        max_model_len: longest sequence served; None: all the model's positions.
        max_num_seqs: requests that run at once; sizes buffers, more are possible.
        threads: processor threads; None: as many as there are cores to use.
        numa: "auto", "off" or the NUMA nodes to compute on, such as "0-1"; see
            ``choose_placement``.
        numa_fallback: where these nodes cannot be had (any more): "auto" instead of an error.
        own_process: this process is there for the backend, so all its threads go to the nodes; else
            only those that compute do, which is none of the caller's.
        compute: "torch", "native" for the C++ library on the CPU, which adds the dtypes "int8"
            and "q4" of weights, or "auto": native where it can serve the model.
        isa: level of the native kernels, a name of ``native.variants()``; None: the best.
        swap_bytes: host memory for swapped KV blocks; None: half the KV pool's size, taken as
            it is used; on CUDA 4 GiB at most, pinned at once.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: settings that the model or the machine cannot do.
    """
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")

    def build() -> tuple[ModelRunner, BackendInfo]:
        started = time.monotonic()
        checkpoint = open_checkpoint(checkpoint_path)
        opened = time.monotonic()
        config = checkpoint.config
        longest = longest_sequence(config)
        length = longest if max_model_len is None else max_model_len
        if not 1 <= length <= longest:
            raise ConfigError(
                f"max_model_len={length} is not in 1 to {longest}, the model's positions"
            )
        _check_positions(config, length)
        place = _choose_device(device)
        # before weights are packed and threads started, which then come to lie on the nodes
        placement = _bound(
            _placed(threads, numa, device=place, fallback=numa_fallback), whole_process=own_process
        )
        formats = choose_formats(
            config,
            compute=compute,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=block_size,
            device=place,
            torch_dtype=partial(_torch_dtype, device=place),
            isa=isa,
        )
        _log.info(
            "compute=%s dtype=%s kv_dtype=%s%s",
            formats.compute, formats.dtype, formats.kv_dtype, formats.why and f": {formats.why}",
        )  # fmt: skip
        loader = _choose_loader(
            checkpoint,
            formats,
            device=place,
            block_size=block_size,
            max_model_len=length,
            threads=placement.threads,
            isa=formats.isa,
        )
        blocks, host_blocks = _choose_sizes(
            loader,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            swap_bytes=swap_bytes,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
        )
        chosen = time.monotonic()
        loaded = loader.load(blocks, host_blocks)
        _log.info(
            "loaded checkpoint=%.2f choice=%.2f weights=%.2f",
            opened - started, chosen - opened, time.monotonic() - chosen,
        )  # fmt: skip
        runner = ModelRunner(
            loaded,
            vocab_size=config.vocab_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
        )
        info = BackendInfo(
            name=formats.compute,
            vocab_size=config.vocab_size,
            max_model_len=length,
            block_size=block_size,
            num_blocks=blocks,
            block_bytes=loader.block_bytes,
            dtype=formats.dtype,
            device=place,
            kv_dtype=formats.kv_dtype,
            choice="; ".join(filter(None, (formats.why, placement.describe(threads)))),
            numa_nodes=placement.nodes,
            num_host_blocks=host_blocks,
            swap_block_seconds=loaded.swap_block_seconds,
        )
        return runner, info

    return WorkerBackend(build)


def _placed(threads: int | None, numa: str, *, device: str, fallback: bool) -> Placement:
    """Where to compute; ``fallback``: as auto would where ``numa`` cannot be had."""
    # a GPU has a node of its own, which is not asked here
    auto = "auto" if device == "cpu" else "off"
    try:
        return choose_placement(threads, auto if numa == "auto" else numa)
    except ConfigError as error:
        if not fallback:
            raise
        _log.warning("numa_fallback numa=%s reason=%s", numa, error)
    return choose_placement(threads, auto)


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
            placement.threads, placement.nodes, cpus, refusal,
        )  # fmt: skip
        why = f"NUMA nodes {placement.nodes} could not be bound to ({refusal})"
        if placement.why:
            why = f"{placement.why}, but it could not be bound ({refusal})"
        return replace(placement, nodes="", cpus=None, why=why)
    _log.info(
        "threads=%d numa_nodes=%s cpus=%s%s",
        placement.threads, placement.nodes, cpus, placement.why and f": {placement.why}",
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


def _choose_device(name: str) -> str:
    """ "cpu", or what PyTorch calls another device. Raises ConfigError for what is not there."""
    if name == "cpu" or (name == "auto" and not may_have_cuda()):
        return "cpu"
    from paceline.backends.torch.machine import choose_device

    return str(choose_device(name))


def _torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))


def _choose_loader(
    checkpoint: Checkpoint,
    formats: Formats,
    *,
    device: str,
    block_size: int,
    max_model_len: int,
    threads: int,
    isa: str | None,
) -> ModelLoader:
    if formats.compute == "native":
        from paceline.backends.native.step import NativeLoader

        return NativeLoader(
            checkpoint=checkpoint,
            dtype=formats.dtype,
            kv_dtype=formats.kv_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            threads=threads,
            isa=isa,
        )
    from paceline.backends.torch.load import TorchLoader

    return TorchLoader(
        checkpoint=checkpoint,
        dtype=formats.dtype,
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        threads=threads,
    )


def _choose_sizes(
    loader: ModelLoader,
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    swap_bytes: int | None,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> tuple[int, int]:
    """Blocks of the KV pool and of the memory to swap to."""
    block_bytes = loader.block_bytes
    if num_blocks is None:
        free_bytes, share = loader.pool_memory()
        num_blocks = choose_num_blocks(
            kv_cache_bytes,
            block_bytes=block_bytes,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=free_bytes,
            share=share,
        )
    if swap_bytes is None:
        # the limit may be infinity, which cannot be divided into blocks
        swap_bytes = int(min(num_blocks * block_bytes // 2, loader.max_host_bytes))
    return num_blocks, swap_bytes // block_bytes
