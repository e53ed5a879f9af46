"""Models that can be quantized, as the GGUF file that is written of them: its metadata and tensors.

A GGUF file in 16 or 32 bits has both already; ``folder`` derives them for a folder of safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.gguf.shards import gguf_files
from paceline.checkpoints.model.checkpoint import Checkpoint

__all__ = ["Field", "GGUFSource", "Source", "StoredTensor"]

_T = TypeVar("_T", bound=np.generic)

# of a split file alone, or written by ``output``
_OWN_KEYS: Final = (
    "general.alignment", "general.architecture", "general.file_type",
    "general.quantization_version", "split.no", "split.count", "split.tensors.count",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file."""

    name: str
    # slowest dimension first
    shape: tuple[int, ...]
    # where its values are kept
    type: GGUFType
    # our names of the matrices that it holds, in its order; none where it is part of the config
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A key of the metadata."""

    name: str
    value: Any
    kind: gguf.GGUFValueType
    # of an array's values
    inner: gguf.GGUFValueType | None = None


class Source(Protocol):
    """A model to be written as a GGUF file."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def architecture(self) -> str:
        """Value of ``general.architecture``."""

    def files(self) -> Sequence[Path]:
        """Return the files whose change makes another model."""

    def fields(self) -> Iterator[Field]:
        """Yield the metadata, without the architecture and what depends on the tensors' types."""

    def tensors(self) -> Sequence[StoredTensor]:
        """Return all tensors, in the order in which they are written."""

    def stored_rows(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        """Put the rows of a tensor of ours in the order that the file has."""

    def stored_bytes(self, tensor: StoredTensor) -> NDArray[Any]:
        """Return what is written of a tensor that keeps its values."""


class GGUFSource:
    """A GGUF file, whole or split."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.architecture = str(checkpoint.file.metadata["general.architecture"])

    def files(self) -> Sequence[Path]:
        return gguf_files(self.checkpoint.path)

    def fields(self) -> Iterator[Field]:
        for name, field in gguf.GGUFReader(self.checkpoint.file.path).fields.items():
            # the writer has no empty arrays
            if not name.startswith("GGUF.") and name not in _OWN_KEYS and len(field.data):
                kind = field.types[0]
                inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                yield Field(name, field.contents(), kind, inner)

    def tensors(self) -> Sequence[StoredTensor]:
        parts_of = self.checkpoint.parts_of
        return [
            StoredTensor(tensor.name, tensor.shape, tensor.type, tuple(parts_of(tensor.name)))
            for tensor in self.checkpoint.file.tensors.values()
        ]

    def stored_rows(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        return self.checkpoint.stored_rows(name, rows)

    def stored_bytes(self, tensor: StoredTensor) -> NDArray[Any]:
        return self.checkpoint.stored_bytes(tensor.name)
