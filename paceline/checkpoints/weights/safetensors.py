"""The safetensors container, one file or a folder of shards: its table of tensors, checked before
anything trusts it.

::

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data

Offsets count from the start of data. The spans must cover the data exactly, without gaps and
overlaps, as the format demands. The tensors that a model needs are not known here.

Source: the format section of the safetensors README.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.model.json_file import parse_json_object, read_json_object
from paceline.errors import CheckpointError

__all__ = [
    "DTYPES", "SafetensorsEntry", "read_data", "read_entries", "read_safetensors_header",
    "values_of",
]  # fmt: skip

# 100 bytes per tensor is usual; the largest models have some 10^5 tensors
MAX_HEADER_BYTES: Final = 16 << 20
MAX_RANK: Final = 8
MAX_SHARDS: Final = 4096
_SINGLE: Final = "model.safetensors"
_PICKLED: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# types that weights are read from, and their other names
DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_ITEM_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor; its bytes are known to lie inside the file."""

    path: Path
    # the format's name of the type: "F32", "BF16", ...
    dtype: str
    shape: tuple[int, ...]
    # first byte, counted from the start of the file
    start: int
    num_bytes: int

    def part(self, rows: slice) -> SafetensorsEntry:
        """Return some rows of the tensor."""
        row_bytes, count = self.num_bytes // self.shape[0], rows.stop - rows.start
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            start=self.start + rows.start * row_bytes,
            num_bytes=count * row_bytes,
        )


def _go_on() -> None:
    """Do not pause."""


def read_safetensors_header(
    path: Path, pause: Callable[[], None] = _go_on
) -> dict[str, SafetensorsEntry]:
    """Read and check the header of ``path``; the data itself is not read. Calls ``pause`` after
    each small part of the work.

    Raises:
        CheckpointError: truncated, or with lengths, shapes or spans that contradict one another
            or the file's size.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size < 10:
                raise CheckpointError(f"{path}: {size} bytes is too small for a safetensors file")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise CheckpointError(
                    f"{path}: truncated or lying: claims a header of {length} bytes in a file of "
                    f"{size} (at most {MAX_HEADER_BYTES} are allowed)"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file: its header starts with {raw[:8]!r}")
    header = parse_json_object(raw, f"{path}: the header")
    pause()
    data_start, entries = 8 + length, {}
    for name, fields in header.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, fields, data_start, size)
            pause()
    _check_cover(path, entries, data_start, size)
    return entries


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _entry(path: Path, name: str, fields: Any, data_start: int, size: int) -> SafetensorsEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} is described by {fields!r:.80}, must be an object")
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise CheckpointError(f"{where} has unknown dtype {dtype!r:.80}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_whole, shape)):
        raise CheckpointError(f"{where} has shape {shape!r:.80}, must be up to {MAX_RANK} sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_whole, span)):
        raise CheckpointError(f"{where} has data_offsets {span!r:.80}, must be [begin, end]")
    begin, end = span
    if begin > end or data_start + end > size:
        raise CheckpointError(
            f"{where} spans bytes {begin} to {end} of data, the file has {size - data_start}"
        )
    bits = _ITEM_BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} takes {bits} bits, its span has {8 * (end - begin)}"
        )
    return SafetensorsEntry(path, dtype, tuple(shape), data_start + begin, end - begin)


def _check_cover(
    path: Path, entries: dict[str, SafetensorsEntry], data_start: int, size: int
) -> None:
    position, previous = data_start, "the header"
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for name, entry in ordered:
        if entry.start != position:
            problem = "overlaps" if entry.start < position else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} {problem} {previous}: "
                f"it starts at byte {entry.start}, expected {position}"
            )
        position, previous = entry.start + entry.num_bytes, repr(name)
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes follow the last tensor")


def read_entries(
    folder: Path, single: str = _SINGLE, pause: Callable[[], None] = _go_on
) -> dict[str, SafetensorsEntry]:
    """Return a folder's tensors by their stored names, from the file ``single`` or the shards that
    its index names. Calls ``pause`` after each small part of the work. Raises CheckpointError where
    a shard is missing or the index contradicts the files."""
    if (folder / single).is_file():
        entries = read_safetensors_header(folder / single, pause)
        if not entries:
            raise CheckpointError(f"{folder / single} holds no tensors")
        return entries
    listed = folder / f"{single}.index.json"
    index = read_json_object(listed)
    if index is None:
        raise CheckpointError(_no_weights(folder, single))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{listed} has no weight_map")
    shards: dict[str, dict[str, SafetensorsEntry]] = {}
    entries = {}
    for name, shard in weight_map.items():
        _check_shard_name(listed, name, shard)
        if shard not in shards:
            if len(shards) >= MAX_SHARDS:
                raise CheckpointError(f"{listed} names more than {MAX_SHARDS} shards")
            shards[shard] = read_safetensors_header(folder / shard, pause)
        if name not in shards[shard]:
            raise CheckpointError(
                f"{folder / shard} has no tensor {name}, which the index promises"
            )
        entries[name] = shards[shard][name]
    # a tensor that the index omits would otherwise be ignored silently
    for shard, held in shards.items():
        for name in held:
            if name not in entries:
                raise CheckpointError(f"{folder / shard} holds {name}, which the index leaves out")
            if entries[name].path.name != shard:
                raise CheckpointError(f"tensor {name} is in {entries[name].path.name} and {shard}")
    return entries


def _check_shard_name(listed: Path, name: str, shard: object) -> None:
    """Check that a shard is a plain file name, which cannot leave the folder."""
    if (
        not isinstance(shard, str)
        or not shard.endswith(".safetensors")
        or shard.startswith(".")
        or any(character in shard for character in "/\\\0:")
    ):
        raise CheckpointError(
            f"{listed}: tensor {name} is in {shard!r:.80}, "
            "which is not the name of a safetensors file in the same folder"
        )
    if not (listed.parent / shard).is_file():
        raise CheckpointError(
            f"{listed.parent} has no {shard}, which {listed.name} names; download it again"
        )


def _no_weights(folder: Path, single: str) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return (
            f"{folder} has only pickled weights ({', '.join(pickled[:3])}). Loading a pickle can "
            "run any code, so Paceline does not. Use the model's safetensors version, or convert "
            "it on a machine you can afford to lose with transformers' save_pretrained()."
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder} has no safetensors; give the file itself: {folder / gguf[0]}"
    return f"{folder} has neither {single} nor {single}.index.json"


def values_of(entry: SafetensorsEntry) -> NDArray[np.float32]:
    """Return a tensor in float32, a fresh array. Raises CheckpointError for other than floats."""
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{entry.path} has a tensor of {entry.dtype}, no type of weights")
    data = read_data(entry)
    if entry.dtype == "BF16":
        # bfloat16 is the upper half of a float32
        upper = np.frombuffer(data, dtype="<u2").astype(np.uint32)
        values = (upper << 16).view(np.float32)
    else:
        code = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[entry.dtype]
        values = np.frombuffer(data, dtype=code).astype(np.float32)
    return values.reshape(entry.shape)


def read_data(entry: SafetensorsEntry) -> bytes:
    """Return a tensor's bytes. Raises CheckpointError where the file has become shorter."""
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        data = file.read(entry.num_bytes)
    if len(data) != entry.num_bytes:
        raise CheckpointError(f"{entry.path} was cut short while it was open")
    return data
