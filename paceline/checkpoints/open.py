"""How a model is opened, whatever its file format: ``FORMATS`` has an entry for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from paceline.checkpoints.gguf.adapter import open_gguf_adapter
from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint, open_gguf
from paceline.checkpoints.gguf.encoder import open_gguf_encoder
from paceline.checkpoints.gguf.shards import read_gguf_parts
from paceline.checkpoints.heads.peft import open_peft
from paceline.checkpoints.heads.pooling import PoolingFiles, pooling_of_folder, pooling_of_gguf
from paceline.checkpoints.hf.checkpoint import HFCheckpoint, open_folder
from paceline.checkpoints.hf.encoder import ENCODERS, open_hf_encoder
from paceline.checkpoints.hf.folder import read_folder
from paceline.checkpoints.model.adapter import AdapterFile
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.encoder import EncoderFiles
from paceline.errors import CheckpointError

__all__ = [
    "FORMATS",
    "FileFormat",
    "OpenedEncoder",
    "OpenedModel",
    "open_adapter",
    "open_checkpoint",
    "open_model",
]


class OpenedModel(NamedTuple):
    """A decoder's files, read once and checked."""

    checkpoint: Checkpoint
    # how hidden states are pooled; None: the model generates
    pooling: PoolingFiles | None


class OpenedEncoder(NamedTuple):
    """An encoder's files, read once and checked."""

    checkpoint: EncoderFiles
    pooling: PoolingFiles


class FileFormat(NamedTuple):
    """A format of model files: whether a path is of it, and how to open one there."""

    matches: Callable[[Path], bool]
    # a decoder, however it is used
    open_checkpoint: Callable[[Path], Checkpoint]
    # arguments as for ``open_model``
    open_model: Callable[[Path, str, str], OpenedModel | OpenedEncoder]


def _open_folder_model(path: Path, runner: str, convert: str) -> OpenedModel | OpenedEncoder:
    folder = read_folder(path)
    pooling = pooling_of_folder(folder, runner, convert)
    if pooling is not None and pooling.encoder in ENCODERS:
        return OpenedEncoder(open_hf_encoder(folder), pooling)
    return OpenedModel(HFCheckpoint(folder), pooling)


def _open_gguf_model(path: Path, runner: str, convert: str) -> OpenedModel | OpenedEncoder:
    file, paths = read_gguf_parts(path)
    pooling = pooling_of_gguf(path, file.metadata, runner, convert)
    if pooling is not None and pooling.encoder in ENCODERS:
        return OpenedEncoder(open_gguf_encoder(file, paths), pooling)
    checkpoint = GGUFCheckpoint(file, paths)
    checkpoint.forget_vocabulary()
    return OpenedModel(checkpoint, pooling)


FORMATS: Final = (
    FileFormat(Path.is_dir, open_folder, _open_folder_model),
    FileFormat(Path.is_file, open_gguf, _open_gguf_model),
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a decoder: a ``.gguf`` file or a Hugging Face folder.

    Raises:
        CheckpointError: missing, malformed, unsafe or of an unsupported architecture.
    """
    return _format_of(path).open_checkpoint(path)


def open_model(
    path: Path, runner: str = "auto", convert: str = "auto"
) -> OpenedModel | OpenedEncoder:
    """Open a model to be computed, without the texts of its tokens.

    Args:
        runner: one of RUNNERS; "generate" and "pooling" decide what "auto" leaves to the files.
        convert: one of CONVERTS: the task of a model whose files do not name it.

    Raises:
        CheckpointError: as for ``open_checkpoint``.
        ConfigError: these files do not support what was asked for.
    """
    return _format_of(path).open_model(path, runner, convert)


def open_adapter(
    path: Path,
    config: ModelConfig,
    max_rank: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> AdapterFile:
    """Open a LoRA adapter for a model: a ``.gguf`` file or a folder of ``peft``.

    Args:
        max_rank: most ranks of a module; None: any number.
        pause: called after each small part of the work.

    Raises:
        CheckpointError: missing, malformed, unsafe, not supported, or of another model's shape.
    """
    if path.is_dir():
        return open_peft(path, config, max_rank, pause)
    if path.is_file():
        return open_gguf_adapter(path, config, max_rank, pause)
    raise CheckpointError(f"{path}: no such file or folder")


def _format_of(path: Path) -> FileFormat:
    for found in FORMATS:
        if found.matches(path):
            return found
    raise CheckpointError(f"{path}: no such file or folder")
