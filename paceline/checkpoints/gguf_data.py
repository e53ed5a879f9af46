"""The bytes of a GGUF file's tensors, mapped, and what they stand for.

This module does not know which tensors a model has.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from paceline.checkpoints.gguf_format import GGUFTensor
from paceline.core.errors import CheckpointError

__all__ = ["GGUFData"]


class GGUFData:
    """The files of one model, mapped as long as this lives."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._maps: list[mmap.mmap] = []
        for part in paths:
            with part.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._data = [np.frombuffer(each, dtype=np.uint8) for each in self._maps]

    def rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """As they are stored, [rows, bytes per row]; backed by the file."""
        flat = self._data[tensor.part][tensor.start : tensor.start + tensor.num_bytes]
        return flat.reshape(-1, tensor.row_bytes)

    def values(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        """Dequantised; a fresh array. Raises CheckpointError for a type that cannot be."""
        data = self.rows(tensor)
        try:
            values = quants.dequantize(data, tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._paths[0]}: tensor {tensor.name} is stored as {tensor.type.name}, "
                "which cannot be dequantised"
            ) from None
        # dequantize returns a view of the file for float32; the caller may change what it gets
        return np.array(values, dtype=np.float32, copy=np.shares_memory(values, data)).reshape(
            tensor.shape
        )

    def release(self) -> None:
        """Give back memory that holds what was read so far."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)
