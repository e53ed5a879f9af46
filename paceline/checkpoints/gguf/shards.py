"""A GGUF model that llama.cpp's ``gguf-split`` has cut into files: their headers combined.

::

    name-00001-of-00003.gguf    all metadata, with split.no=0, split.count=3, split.tensors.count
    name-00002-of-00003.gguf    split.no=1, split.count=3; tensors
    name-00003-of-00003.gguf    likewise

Source: ``gguf-split`` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.checkpoints.gguf.container import GGUFFile, GGUFTensor, read_gguf
from paceline.checkpoints.hub.names import parts_of
from paceline.errors import CheckpointError

__all__ = ["gguf_files", "read_gguf_parts", "weight_files"]


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the files with a checkpoint's weights: a folder's safetensors, or parts of a GGUF."""
    return tuple(path.glob("*.safetensors")) if path.is_dir() else gguf_files(path)


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a model by the path of any of its parts; only names are used."""
    return tuple(path.with_name(name) for name in parts_of(path.name))


def read_gguf_parts(path: Path) -> tuple[GGUFFile, tuple[Path, ...]]:
    """Return the header and the files of the model that ``path`` belongs to. Each tensor's ``part``
    is the index of its file, and ``start`` counts from that file's start.

    Raises:
        CheckpointError: a part is missing, malformed or of another model.
    """
    paths = gguf_files(path)
    if missing := [part for part in paths if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {len(paths)} parts of a model, and {missing[0].name} is not there"
        )
    files = [read_gguf(part) for part in paths]
    tensors: dict[str, GGUFTensor] = {}
    for index, file in enumerate(files):
        _check_place(file, index, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{file.path}: tensor {name!r} is in another part too")
            tensors[name] = replace(tensor, part=index)
    first = files[0]
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(f"{first.path} counts {count} tensors, its parts hold {len(tensors)}")
    return replace(first, tensors=tensors), paths


def _check_place(file: GGUFFile, index: int, count: int) -> None:
    """Raise CheckpointError where a file is another part than its name says."""
    claimed = file.metadata.get("split.count", 1)
    if count == 1:
        if isinstance(claimed, int) and claimed <= 1:
            return
        raise CheckpointError(
            f"{file.path} is one of {claimed!r:.20} parts of a model, which are told by names like "
            f"model-00001-of-{claimed!s:0>5.5}.gguf: give them their names back"
        )
    number = file.metadata.get("split.no", -1)
    if (claimed, number) != (count, index):
        raise CheckpointError(
            f"{file.path} should be part {index + 1} of {count}, and says split.no={number!r:.20}, "
            f"split.count={claimed!r:.20}"
        )
