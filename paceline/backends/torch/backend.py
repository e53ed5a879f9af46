"""The torch ModelBackend: loading, sizing, and one worker thread.

All of torch runs on that thread. Its number of processor threads is set there, and two backends in
one process share nothing but the machine.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from paceline.backends.torch.attention import TorchAttention, block_bytes
from paceline.backends.torch.machine import (
    choose_device,
    choose_dtype,
    choose_num_blocks,
    choose_threads,
)
from paceline.backends.torch.model import Decoder
from paceline.backends.torch.rope import RotaryTable, longest_sequence
from paceline.backends.torch.runner import ModelRunner
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.base import open_checkpoint
from paceline.core.backend import BackendInfo
from paceline.core.errors import ConfigError
from paceline.core.outputs import SchedulerOutput, StepResult

__all__ = ["TorchBackend"]


class TorchBackend:
    """See ``core.backend.ModelBackend``. Made by ``load``."""

    def __init__(
        self, runner: ModelRunner, info: BackendInfo, executor: ThreadPoolExecutor
    ) -> None:
        self._runner: ModelRunner | None = runner
        self._info = info
        self._executor = executor

    @classmethod
    def load(
        cls,
        checkpoint_path: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int = 16,
        kv_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        threads: int | None = None,
    ) -> TorchBackend:
        """Open a checkpoint and get ready to run plans.

        Args:
            checkpoint_path: a Hugging Face folder or a .gguf file.
            device: "auto", "cpu", "cuda" or "cuda:N".
            dtype: "auto", "float32" or "bfloat16"; of weights, activations and KV cache.
            block_size: tokens per KV block.
            kv_cache_bytes: the KV pool's size at most; None: see ``machine.choose_num_blocks``.
            max_model_len: longest sequence served; None: all the model's positions.
            max_num_seqs: requests that run at once; sizes buffers, more are possible.
            threads: processor threads; None: as many as there are cores to use.

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
                block_size=block_size,
                kv_cache_bytes=kv_cache_bytes,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
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
        return self._executor.submit(self._runner.run, plan)

    def close(self) -> None:
        # the runner goes first: a plan handed over from now on is an error, queued ones still run
        self._runner = None
        self._executor.shutdown(wait=True)


def _build(
    path: Path,
    *,
    device: torch.device,
    dtype: str,
    block_size: int,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
) -> tuple[ModelRunner, BackendInfo]:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    longest = longest_sequence(config)
    length = longest if max_model_len is None else max_model_len
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len={length} is not in 1 to {longest}, the model's positions")
    torch_dtype = choose_dtype(dtype, device)
    with torch.inference_mode():
        weights = load_weights(checkpoint, dtype=torch_dtype, device=device)
        rotary = RotaryTable(config, length, dtype=torch_dtype, device=device)
        bytes_per_block = block_bytes(config, block_size, torch_dtype)
        num_blocks = choose_num_blocks(
            kv_cache_bytes,
            block_bytes=bytes_per_block,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            device=device,
        )
        attention = TorchAttention(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=torch_dtype,
            device=device,
        )
    runner = ModelRunner(
        Decoder(config, weights, rotary),
        attention,
        vocab_size=config.vocab_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        device=device,
    )
    info = BackendInfo(
        name="torch",
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=bytes_per_block,
        dtype=str(torch_dtype).removeprefix("torch."),
        device=str(device),
    )
    return runner, info
