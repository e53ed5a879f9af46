"""What a model's weights, keys and values take where ``serve`` would compute it on this machine,
without loading it: for planning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from paceline.backends.formats import Formats, choose_formats
from paceline.backends.loaders import torch_dtype
from paceline.backends.native import packed_bytes
from paceline.backends.native.step import native_block_bytes
from paceline.checkpoints.base import Checkpoint, open_checkpoint

__all__ = ["ServedMemory", "served_memory", "weight_bytes"]

# The server's two processes without weights, keys and values: interpreter, libraries, activations.
# Native: measured with the default model and 32 requests, 62 MB of the engine's and 109 MB of the
# other. PyTorch: 190 MB more when it is imported; activations under load were not measured.
_PROCESS_BYTES: Final = {"native": 171_000_000, "torch": 361_000_000}


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """In bytes."""

    # "native" or "torch"
    compute: str
    # of weights, and of the KV cache
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: float
    # of what else is in the processes, about
    process_bytes: int


def weight_bytes(checkpoint: Checkpoint, formats: Formats) -> int:
    """What its weights take in formats that ``choose_formats`` settled."""
    if formats.compute == "native":
        return packed_bytes(checkpoint, formats.dtype)
    from paceline.backends.torch.machine import choose_dtype

    values = sum(math.prod(checkpoint.tensor_shape(name)) for name in checkpoint.tensor_names())
    return values * choose_dtype(formats.dtype, "cpu").itemsize


def served_memory(
    path: Path, *, dtype: str = "auto", kv_dtype: str = "auto", block_size: int = 16
) -> ServedMemory:
    """Of a GGUF file or a Hugging Face folder, in the formats that ``serve`` takes on the processor
    of this machine, by itself or where these are asked for.

    Raises:
        CheckpointError: no checkpoint, or one that is not read.
        ConfigError: nothing here computes it.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    formats = choose_formats(
        config,
        compute="auto",
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        device="cpu",
        torch_dtype=partial(torch_dtype, device="cpu"),
    )
    if formats.compute == "native":
        block = native_block_bytes(config, block_size, formats.kv_dtype)
    else:
        from paceline.backends.torch.attention import block_bytes
        from paceline.backends.torch.machine import choose_dtype

        block = block_bytes(config, block_size, choose_dtype(formats.dtype, "cpu"))
    return ServedMemory(
        formats.compute,
        formats.dtype,
        formats.kv_dtype,
        weight_bytes(checkpoint, formats),
        block / block_size,
        _PROCESS_BYTES[formats.compute],
    )
