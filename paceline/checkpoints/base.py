"""What every checkpoint offers, whatever its file format, and how one is opened.

The names and shapes of tensors are in ``shapes.py``. This module does not know how a file is laid
out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.config import ModelConfig
from paceline.checkpoints.gguf import GGUFCheckpoint
from paceline.checkpoints.hf import HFCheckpoint
from paceline.checkpoints.shapes import expected_shapes
from paceline.core.errors import CheckpointError

__all__ = ["Checkpoint", "expected_shapes", "open_checkpoint"]


class Checkpoint(Protocol):
    """An opened model file or folder, checked: the config is sane and every tensor of the model is
    there with the shape the config implies. Opening raises CheckpointError otherwise.

    Safe to use from one thread at a time; the file must not change while it is open.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor_names(self) -> tuple[str, ...]:
        """Names of the model's tensors; ``lm_head.weight`` is missing when tied."""
        ...

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first. Raises CheckpointError for an unknown name."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The values in float32, dequantised; a fresh array that the caller may keep and change.

        Raises CheckpointError for an unknown name or a stored type that cannot be converted.
        """
        ...

    def raw_tensor(self, name: str) -> tuple[NDArray[np.uint8], str]:
        """A matrix as it is stored, [rows, bytes per row], and GGUF's name of the type, e.g.
        "Q4_1" or "BF16". Rows are in Hugging Face order.

        Raises CheckpointError for an unknown name or what is no matrix.
        """
        ...

    def tensor_type(self, name: str) -> str:
        """GGUF's name of the type that a tensor is stored as. Raises CheckpointError for an
        unknown name."""
        ...

    def release(self) -> None:
        """Give back memory that holds what was read so far. Raw tensors stay readable: the system
        reads them again."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file or a Hugging Face folder.

    Raises:
        CheckpointError: missing, malformed, unsafe or of an unsupported architecture.
    """
    if path.is_dir():
        return HFCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path}: no such file or folder")
