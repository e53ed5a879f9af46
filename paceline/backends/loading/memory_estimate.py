"""Memory that a model takes where ``serve`` computes it on this machine, estimated for planning
from its files alone. Nothing is loaded, and PyTorch need not be installed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.loading.plan import choose_device
from paceline.backends.machine.cpu import multiplies_bfloat16
from paceline.backends.native import packed_bytes
from paceline.backends.native.step import native_block_bytes, native_step_bytes, native_window
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import OpenedEncoder, open_model
from paceline.errors import ConfigError

__all__ = ["ServedMemory", "served_memory", "weight_bytes"]

# Resident in the server's two processes without a model: interpreter, libraries, routes. Measured
# by ``python -m benchmarks.memory``, which also holds the sum of all parts to 5 %
_PROCESS_BYTES: Final = {"native": 94_000_000, "torch": 284_000_000}
# bytes per token of a vocabulary in the process that makes text: ids, texts and merges
_TOKEN_BYTES: Final = 320
# tokens, and sampled rows, of a step: on a processor steps become no larger by themselves
# (``core.predict.chunk``), though they may, and few of many requests are sampled in one
_TOKENS: Final = 512
_ROWS: Final = 16
_VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """Memory that a served model takes, in bytes."""

    # "native" or "torch"
    compute: str
    # "cpu", or PyTorch's name of another device
    device: str
    # formats of the weights and of the KV cache
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: float
    # part of bytes_per_token in layers that may have window blocks, and tokens of a window; 0: none
    window_bytes_per_token: float
    window: int
    # estimate for the rest of the processes while prompts are computed; 0 on a GPU, where it was
    # not measured
    process_bytes: int


def weight_bytes(checkpoint: Checkpoint, formats: Formats, *, has_head: bool = True) -> int:
    """Return the weights' bytes in formats that ``choose_formats`` has settled."""
    if formats.compute == "native":
        return packed_bytes(checkpoint, formats.dtype, has_head=has_head)
    values = sum(
        math.prod(checkpoint.tensor_shape(name))
        for name in checkpoint.tensor_names()
        if has_head or name != "lm_head.weight"
    )
    return values * _VALUE_BYTES[formats.dtype]


def served_memory(
    path: Path,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    device: str = "auto",
) -> ServedMemory:
    """Estimate the memory of a GGUF file or a Hugging Face folder, in the formats that ``serve``
    would choose, or in those asked for.

    Args:
        device: as ``--device`` takes it; "cuda" and "cuda:N" need not be there.

    Raises:
        CheckpointError: there is no checkpoint that can be read.
        ConfigError: no compute path here supports it, or it has no KV cache to plan.
    """
    if re.fullmatch("cpu|cuda(:[0-9]+)?", device) is None:
        device = choose_device(device)
    opened = open_model(path)
    if isinstance(opened, OpenedEncoder) or opened.checkpoint.config.bidirectional:
        raise ConfigError(
            f"{path} attends to both sides and has no KV cache: what it takes does not depend on "
            "the number of sequences, so there is nothing to estimate"
        )
    checkpoint, pooling, config = opened.checkpoint, opened.pooling, opened.checkpoint.config
    formats = choose_formats(
        config,
        compute="auto",
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        device=device,
        torch_dtype=lambda name: _torch_dtype(name, device),
        pooled=pooling is not None,
        planned=True,
    )
    has_head = pooling is None
    process_bytes = 0
    if formats.compute == "native":
        block = native_block_bytes(config, block_size, formats.kv_dtype)
        window = native_window(config)
    else:
        block = _torch_block_bytes(config, block_size, formats.dtype)
        window = (config.sliding_window or 0) if config.sliding_layers else 0
    if pooling is not None:
        window = 0
    if device == "cpu":
        length = config.longest
        if pooling is not None:
            length = min(length, pooling.max_seq_length or length)
        process_bytes = _process_bytes(config, formats, has_head, length)
    return ServedMemory(
        formats.compute,
        device,
        formats.dtype,
        formats.kv_dtype,
        weight_bytes(checkpoint, formats, has_head=has_head),
        block / block_size,
        block * len(config.sliding_layers) / config.num_hidden_layers / block_size if window else 0,
        window,
        process_bytes,
    )


def _process_bytes(config: ModelConfig, formats: Formats, has_head: bool, length: int) -> int:
    tables = 1 if config.sliding_rope is None else 2
    # tables of cosines and sines
    rope = tables * 4 * config.head_dim * length
    # PyTorch's steps were not measured, and take about as much
    step = native_step_bytes(config, _TOKENS, _ROWS if has_head else 0)
    vocabulary = _TOKEN_BYTES * config.vocab_size
    return _PROCESS_BYTES[formats.compute] + vocabulary + rope + step


def _torch_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Return the bytes of a KV block as ``torch.attention`` lays it out."""
    per_position = 2 * config.num_key_value_heads * config.head_dim * _VALUE_BYTES[dtype]
    return config.num_hidden_layers * block_size * per_position


def _torch_dtype(name: str, device: str) -> str:
    """Choose as ``torch.machine`` does, assuming that a GPU multiplies bfloat16."""
    if name == "auto":
        return "bfloat16" if device != "cpu" or multiplies_bfloat16() else "float32"
    return name
