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
from paceline.backends.native import packed_bytes
from paceline.backends.native.step import native_block_bytes
from paceline.checkpoints.base import Checkpoint, open_checkpoint

__all__ = ["ServedMemory", "served_memory"]

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


def served_memory(path: Path, *, block_size: int = 16) -> ServedMemory:
    """Of a GGUF file or a Hugging Face folder, in the formats that ``serve`` takes by itself on the
    processor of this machine.

    Raises:
        CheckpointError: no checkpoint, or one that is not read.
        ConfigError: nothing here computes it.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    formats = choose_formats(
        config,
        compute="auto",
        dtype="auto",
        kv_dtype="auto",
        block_size=block_size,
        device="cpu",
        torch_dtype=partial(_torch_dtype, device="cpu"),
    )
    if formats.compute == "native":
        weights = packed_bytes(checkpoint, formats.dtype)
        block = native_block_bytes(config, block_size, formats.kv_dtype)
    else:
        weights, block = _on_torch(checkpoint, formats, block_size)
    return ServedMemory(
        formats.compute,
        formats.dtype,
        formats.kv_dtype,
        weights,
        block / block_size,
        _PROCESS_BYTES[formats.compute],
    )


def _on_torch(checkpoint: Checkpoint, formats: Formats, block_size: int) -> tuple[int, int]:
    from paceline.backends.torch.attention import block_bytes
    from paceline.backends.torch.machine import choose_dtype

    dtype = choose_dtype(formats.dtype, "cpu")
    values = sum(math.prod(checkpoint.tensor_shape(name)) for name in checkpoint.tensor_names())
    return values * dtype.itemsize, block_bytes(checkpoint.config, block_size, dtype)


def _torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))
