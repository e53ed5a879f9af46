"""How a checkpoint is opened, whatever its file format."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import CheckpointError

__all__ = ["open_checkpoint"]


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
