"""The native compute path in the place of ``model.Decoder`` and ``attention.TorchAttention``.

It computes the whole step in one call, so it is both: it keeps the blocks and runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, checkpoint_tensors
from paceline.backends.torch.attention import AttentionBatch
from paceline.backends.torch.rope import inverse_frequencies
from paceline.checkpoints.base import Checkpoint
from paceline.checkpoints.config import ModelConfig
from paceline.core.outputs import BlockSwap

__all__ = ["NativeStep", "load_native", "native_block_bytes"]

_VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}
# int8: float32 scales, one for a token's keys and one for its values in every head
_SCALE_BYTES: Final = {"float32": 0, "bfloat16": 0, "int8": 4}


def native_block_bytes(config: ModelConfig, block_size: int, kv_dtype: str) -> int:
    """Bytes of one KV block over all layers, as ``NativeModel.kv_bytes_per_block`` will say."""
    per_head = 2 * (config.head_dim * _VALUE_BYTES[kv_dtype] + _SCALE_BYTES[kv_dtype])
    return config.num_hidden_layers * block_size * config.num_key_value_heads * per_head


def load_native(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    kv_dtype: str,
    num_blocks: int,
    num_host_blocks: int,
    block_size: int,
    max_model_len: int,
    threads: int,
) -> NativeStep:
    """Read a model into the native library, in formats that ``choose_formats`` settled."""
    frequencies, factor = inverse_frequencies(checkpoint.config, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    model = NativeModel(
        checkpoint.config,
        checkpoint_tensors(checkpoint),
        ((angles.cos() * factor).numpy(), (angles.sin() * factor).numpy()),
        dtype=dtype,
        kv_dtype=kv_dtype,
        # on the CPU the host's memory is the pool's: swapped blocks lie behind the others, and the
        # system gives the memory when it is written
        num_blocks=num_blocks + num_host_blocks,
        block_size=block_size,
        threads=threads,
    )
    return NativeStep(model, num_blocks)


class NativeStep:
    """A ``NativeModel`` as ``runner.ModelRunner`` drives it."""

    def __init__(self, model: NativeModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        """Take the shape of the next step."""
        self._batch = batch

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        first = self._num_blocks
        self._model.copy_blocks(
            [(s.src, first + s.dst) if s.to_host else (first + s.src, s.dst) for s in swaps]
        )

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: the kernels read no slot that was not written."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampled: torch.Tensor,
        attention: object,
        needs_logits: bool = True,
    ) -> torch.Tensor:
        """Logits [S, vocab] in float32, valid until the next call; see ``StepModel.forward``."""
        batch = self._batch
        assert batch is not None, "forward() before prepare()"
        starts = np.zeros(len(batch.counts) + 1, dtype=np.int32)
        np.cumsum(batch.counts, out=starts[1:])
        logits = self._model.forward(
            token_ids.numpy(),
            positions.numpy(),
            starts,
            batch.block_tables,
            sampled.numpy(),
            needs_logits=needs_logits,
        )
        return torch.from_numpy(logits)

    @property
    def likeliest(self) -> NDArray[np.int32]:
        return self._model.likeliest

    def close(self) -> None:
        self._model.close()
