"""The bytes of a GGUF file's tensors, mapped, and their values.

This module does not know which tensors a model has.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.blocks import BLOCKS
from paceline.checkpoints.gguf.container import GGUFTensor, GGUFType
from paceline.errors import CheckpointError

__all__ = ["GGUFData"]

# values dequantised at a time: at once, a matrix would take several times its final memory
_AT_ONCE: Final = 1 << 20


class GGUFData:
    """The files of one model, mapped as long as this object lives."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._maps: list[mmap.mmap] = []
        for part in paths:
            with part.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._data = [np.frombuffer(each, dtype=np.uint8) for each in self._maps]

    def rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """Return the stored bytes, [rows, bytes per row], backed by the file."""
        flat = self._data[tensor.part][tensor.start : tensor.start + tensor.num_bytes]
        return flat.reshape(-1, tensor.row_bytes)

    def values(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        """Return dequantised values, a fresh array. Raises CheckpointError for other types."""
        data = self.rows(tensor)
        values = np.empty((len(data), tensor.shape[-1]), dtype=np.float32)
        step = max(1, _AT_ONCE // tensor.shape[-1])
        decode = _PLAIN.get(tensor.type) or _decoder(tensor.type)
        try:
            for first in range(0, len(data), step):
                some = slice(first, first + step)
                values[some] = decode(data[some])
        except NotImplementedError:
            raise CheckpointError(
                f"{self._paths[0]}: tensor {tensor.name} is stored as {tensor.type.name}, "
                "which cannot be dequantised"
            ) from None
        return values.reshape(tensor.shape)

    def release(self) -> None:
        """Free memory that holds what was read so far."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)


# [rows, bytes] to [rows, values]
_Decoder: TypeAlias = Callable[[NDArray[np.uint8]], NDArray[Any]]
_PLAIN: Final[Mapping[GGUFType, _Decoder]] = {
    GGUFType.F32: lambda data: data.view("<f4"),
    GGUFType.F16: lambda data: data.view("<f2"),
    # bfloat16 is the upper half of a float32
    GGUFType.BF16: lambda data: (data.view("<u2").astype(np.uint32) << 16).view(np.float32),
}


def _in_blocks(data: NDArray[np.uint8], size: int, decode: _Decoder) -> NDArray[Any]:
    return decode(data.reshape(-1, size)).reshape(len(data), -1)


def _decoder(kind: GGUFType) -> _Decoder:
    """Return the decoder of a type; those of rare ones are the ``gguf`` package's, which is
    imported only for them. Raises CheckpointError where it is not installed."""
    if kind in BLOCKS:
        size, decode = BLOCKS[kind]
        return partial(_in_blocks, size=size, decode=decode)
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise CheckpointError(
            f"the file has matrices in {kind.name}, which the package gguf reads: pip install "
            "'paceline[gguf]'"
        ) from None
    return partial(quants.dequantize, qtype=GGMLQuantizationType(kind))
