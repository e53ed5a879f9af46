"""The interface of every checkpoint, whatever its file format, and how one is opened.

The names and shapes of tensors are in ``shapes.py``. This module does not know the layout of a
file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.shapes import expected_shapes

__all__ = ["Checkpoint", "expected_shapes"]


class Checkpoint(Protocol):
    """An opened model file or folder, checked: the config is sane and every tensor of the model
    exists with the shape that the config implies. Opening raises CheckpointError otherwise.

    Safe to use from one thread at a time; the file must not change while it is open.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the model's tensors; ``lm_head.weight`` is missing when tied."""

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, rows first. Raises CheckpointError for an unknown name."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the values in float32, dequantised: a fresh array that the caller may change.

        Raises CheckpointError for an unknown name or a stored type that cannot be converted.
        """

    def raw_tensor(self, name: str) -> tuple[NDArray[np.uint8], str]:
        """Return a matrix as it is stored, [rows, bytes per row], and GGUF's name of its type, such
        as "Q4_1" or "BF16". Rows are in Hugging Face order.

        Raises CheckpointError for an unknown name or a tensor that is not a matrix.
        """

    def tensor_type(self, name: str) -> str:
        """Return GGUF's name of the type that a tensor is stored in. Raises CheckpointError for an
        unknown name."""

    def release(self) -> None:
        """Free memory that holds parts of the file. Raw tensors stay readable: the system reads
        them again."""
