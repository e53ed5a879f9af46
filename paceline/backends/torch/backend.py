"""The torch ModelBackend: loading, sizing, and one worker thread.

All of torch runs on that thread. Its number of processor threads is set there, and two backends in
one process share nothing but the machine.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from paceline.backends.torch.attention import TorchAttention, block_bytes
from paceline.backends.torch.formats import choose_formats
from paceline.backends.torch.machine import (
    choose_device,
    choose_dtype,
    choose_num_blocks,
    choose_threads,
)
from paceline.backends.torch.model import Decoder
from paceline.backends.torch.native_step import load_native, native_block_bytes
from paceline.backends.torch.rope import RotaryTable, longest_sequence
from paceline.backends.torch.runner import BlockStore, ModelRunner, StepModel
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.base import open_checkpoint
from paceline.core.backend import BackendInfo
from paceline.core.errors import ConfigError
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import BlockSwap, SchedulerOutput, StepResult

__all__ = ["TorchBackend"]

_log = logging.getLogger(__name__)

# host memory to swap to on CUDA, unless said otherwise
_PINNED_BYTES = 4 << 30
# blocks moved to measure how long one takes
_SWAPPED = 8


class TorchBackend:
    """See ``core.backend.ModelBackend``. Made by ``load``."""

    def __init__(
        self, runner: ModelRunner, info: BackendInfo, executor: ThreadPoolExecutor
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._info = info
        self._executor = executor
        self._mask_thread: ThreadPoolExecutor | None = None
        # the last fetch of swapped blocks
        self._prefetch: Future[None] | None = None

    @classmethod
    def load(
        cls,
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
        compute: str = "torch",
        swap_bytes: int | None = None,
    ) -> TorchBackend:
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
            compute: "torch", "native" for the C++ library on the CPU, which adds the dtypes "int8"
                and "q4" of weights, or "auto": native where it can serve the model.
            swap_bytes: host memory for swapped KV blocks; None: half the KV pool's size, taken as
                it is used; on CUDA 4 GiB at most, pinned at once.

        Raises:
            CheckpointError: the model cannot be read.
            ConfigError: settings that the model or the machine cannot do.
        """
        for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        num_threads = choose_threads(threads)
        executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-torch")

        def build() -> TorchBackend:
            # of this thread only, with OpenMP
            torch.set_num_threads(num_threads)
            runner, info = _build(
                checkpoint_path,
                device=choose_device(device),
                dtype=dtype,
                kv_dtype=kv_dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_bytes=kv_cache_bytes,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                threads=num_threads,
                compute=compute,
                swap_bytes=swap_bytes,
            )
            return cls(runner, info, executor)

        try:
            return executor.submit(build).result()
        except BaseException:
            executor.shutdown()
            raise

    @property
    def info(self) -> BackendInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Queue one step. Raises RuntimeError after ``close``."""
        if self._runner is None:
            raise RuntimeError("the backend is closed")
        runner = self._runner
        if self._prefetch is not None and self._prefetch.done():
            # blocks that did not come back must not be computed with
            self._prefetch.result()
        future = self._executor.submit(runner.run, plan)
        if plan.prefetches:
            self._prefetch = self._executor.submit(runner.prefetch, plan)
        return future

    def constrain(self, matchers: MatcherSource) -> None:
        assert self._runner is not None, "constrain() after close()"
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-masks")
        self._runner.constrain(matchers, self._mask_thread)

    def close(self) -> None:
        # the runner goes first: a plan handed over from now on is an error, queued ones still run
        self._runner = None
        self._executor.shutdown(wait=True)
        if self._mask_thread is not None:
            self._mask_thread.shutdown()


def _build(
    path: Path,
    *,
    device: torch.device,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
    threads: int,
    compute: str,
    swap_bytes: int | None,
) -> tuple[ModelRunner, BackendInfo]:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    longest = longest_sequence(config)
    length = longest if max_model_len is None else max_model_len
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len={length} is not in 1 to {longest}, the model's positions")
    formats = choose_formats(
        config,
        compute=compute,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        device=device,
    )
    _log.info(
        "compute=%s dtype=%s kv_dtype=%s%s",
        formats.compute, formats.dtype, formats.kv_dtype, formats.why and f": {formats.why}",
    )  # fmt: skip
    native = formats.compute == "native"
    if native:
        bytes_per_block = native_block_bytes(config, block_size, formats.kv_dtype)
    else:
        torch_dtype = choose_dtype(formats.dtype, device)
        bytes_per_block = block_bytes(config, block_size, torch_dtype)
    if num_blocks is None:
        num_blocks = choose_num_blocks(
            kv_cache_bytes,
            block_bytes=bytes_per_block,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            device=device,
        )
    if swap_bytes is None:
        # on CUDA it is pinned, so taken at once
        most = _PINNED_BYTES if device.type == "cuda" else math.inf
        num_host_blocks = int(min(num_blocks // 2, most // bytes_per_block))
    else:
        num_host_blocks = swap_bytes // bytes_per_block
    decoder: StepModel
    store: BlockStore
    if native:
        decoder = store = load_native(
            checkpoint,
            dtype=formats.dtype,
            kv_dtype=formats.kv_dtype,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            max_model_len=length,
            threads=threads,
        )
    else:
        with torch.inference_mode():
            weights = load_weights(checkpoint, dtype=torch_dtype, device=device)
            rotary = RotaryTable(config, length, dtype=torch_dtype, device=device)
            decoder = Decoder(config, weights, rotary)
            store = TorchAttention(
                config,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=torch_dtype,
                device=device,
                num_host_blocks=num_host_blocks,
            )
    if native:
        # the library has a team of its own, and OpenMP's would spin on its processors after every
        # operation of PyTorch's
        torch.set_num_threads(1)
    runner = ModelRunner(
        decoder,
        store,
        vocab_size=config.vocab_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        device=device,
    )
    info = BackendInfo(
        name=formats.compute,
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=bytes_per_block,
        dtype=formats.dtype,
        device=str(device),
        kv_dtype=formats.kv_dtype,
        choice=formats.why,
        num_host_blocks=num_host_blocks,
        swap_block_seconds=_swap_seconds(store, min(num_blocks, num_host_blocks)),
    )
    return runner, info


def _swap_seconds(store: BlockStore, num_blocks: int) -> float:
    """Measured seconds to move one block to or from host memory."""
    count = min(num_blocks, _SWAPPED)
    if count == 0:
        return 0.0
    seconds = math.inf
    # the first time, memory is taken
    for _ in range(3):
        started = time.perf_counter()
        with torch.inference_mode():
            store.swap_blocks([BlockSwap(block, block, True) for block in range(count)])
            store.swap_blocks([BlockSwap(block, block, False) for block in range(count)])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        seconds = min(seconds, (time.perf_counter() - started) / (2 * count))
    return seconds
