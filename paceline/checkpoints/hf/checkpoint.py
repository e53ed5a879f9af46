"""A Hugging Face folder as a checkpoint: config.json plus safetensors, sharded or not.

Only JSON and safetensors are read. Pickled weights (.bin, .pt) and Python files are never opened.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.architectures import ARCHITECTURES
from paceline.checkpoints.hf.config import HFConfig, read_hf_config
from paceline.checkpoints.hf.folder import HFFolder, read_folder
from paceline.checkpoints.model.checkpoint import check_shapes, expected_shapes, row_order
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.fields import warn_once
from paceline.checkpoints.weights.quantised import Quantisation, QuantisedMatrix
from paceline.checkpoints.weights.safetensors import (
    DTYPES,
    SafetensorsEntry,
    read_data,
    read_entries,
    values_of,
)
from paceline.errors import CheckpointError

__all__ = ["HFCheckpoint", "open_folder"]

_T = TypeVar("_T", bound=np.generic)
# one stored tensor, or a matrix made of several
_Stored: TypeAlias = SafetensorsEntry | QuantisedMatrix

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
# transformers' names of a classifying decoder's head
HEAD: Final[tuple[str, ...]] = ("score.weight", "score.bias")
# prefixes of layers for multi-token prediction (MTP), see ``mtp``
_MTP: Final = ("model.mtp_layers.", "mtp.")


class HFCheckpoint:
    """An opened Hugging Face folder; see ``model.checkpoint`` for the contract.

    Raises:
        CheckpointError: no or unsupported config, no safetensors, malformed or missing shards, or
            tensors that disagree with the config.
    """

    def __init__(self, folder: HFFolder) -> None:
        self._folder = folder.path
        # files of which a matrix was read as it is stored
        self._maps: dict[Path, mmap.mmap] = {}
        # the config is checked first: "this architecture is not supported" is the more useful error
        named = read_hf_config(folder)
        self._head_is_absent, self._quantisation = named.is_headless, named.quantisation
        stored = read_entries(folder.path)
        self._head: dict[str, SafetensorsEntry] = {
            name: stored.pop(name) for name in HEAD if name in stored
        }
        # not part of the model: the code that uses these tensors checks them
        self.mtp: Mapping[str, SafetensorsEntry] = {
            name: stored.pop(name) for name in list(stored) if name.startswith(_MTP)
        }
        entries = _matrices_of(folder.path, stored, named)
        self._config = replace(named.model, stored_dtype=_main_dtype(entries, named.quantisation))
        self._parts = _parts_of(folder.path, entries, self._config)
        self._untie()
        self._names = self.check_shapes()

    def _untie(self) -> None:
        """Use the head that the file holds, where the config ties it to a different embedding."""
        head, embedding = self._parts.get(_HEAD), self._parts.get(_EMBEDDING)
        if head is None or self._head_is_absent or not self._config.tie_word_embeddings:
            return
        if embedding is None:
            # tied weights may be stored under either name
            self._parts[_EMBEDDING] = head
        elif not _same_values(head.entry, embedding.entry):
            warn_once(
                f"{self._folder}: config.json has tie_word_embeddings true, and lm_head.weight "
                "differs from the embedding: it is used as the head"
            )
            self._config = replace(self._config, tie_word_embeddings=False)

    @property
    def path(self) -> Path:
        return self._folder

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def quantisation(self) -> str:
        """Method that quantised the matrices, for users; empty: they are not quantised."""
        return "" if self._quantisation is None else self._quantisation.text

    def tensor_names(self) -> tuple[str, ...]:
        return self._names

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def tensor_file(self, name: str) -> Path:
        """Return the safetensors file that holds ``name``, already checked."""
        return self._find(name).path

    def stored_part(self, name: str) -> tuple[str, slice | None]:
        """Return the stored tensor that holds ``name``, and its rows there; None: all of them."""
        self._find(name)
        part = self._parts[name]
        return part.stored_name, part.rows

    def is_quantised(self, name: str) -> bool:
        """Whether ``name`` is made of several stored tensors, so that only ``tensor`` reads it."""
        return not isinstance(self._find(name), SafetensorsEntry)

    def tensor(self, name: str) -> NDArray[np.float32]:
        entry = self._find(name)
        values = _values(entry)
        return self._ordered(name, values)

    def tensor_row(self, name: str, row: int) -> NDArray[np.float32]:
        """Return a row of a matrix, without reading the others. Raises CheckpointError for a row
        that does not exist."""
        entry = self._find(name)
        if not 0 <= row < entry.shape[0]:
            raise CheckpointError(f"{self._folder}: {name} has {entry.shape[0]} rows, no {row}")
        if not isinstance(entry, SafetensorsEntry):
            found: NDArray[np.float32] = entry.part(slice(row, row + 1)).values()[0]
            return found
        size = entry.num_bytes // entry.shape[0]
        start = entry.start + row * size
        return values_of(replace(entry, shape=entry.shape[1:], start=start, num_bytes=size))

    def head_tensor(self, name: str) -> NDArray[np.float32] | None:
        """Return a tensor of HEAD, the classifier's head; None where there is none."""
        entry = self._head.get(name)
        return None if entry is None else values_of(entry)

    def raw_tensor(self, name: str) -> tuple[NDArray[np.uint8], str]:
        entry = self._find(name)
        if len(entry.shape) != 2:
            raise CheckpointError(f"{name} has shape {list(entry.shape)}; only matrices have rows")
        if not isinstance(entry, SafetensorsEntry):
            return self._ordered(name, entry.blocks()), entry.dtype
        return self._ordered(name, self._mapped(entry).reshape(entry.shape[0], -1)), entry.dtype

    def tensor_type(self, name: str) -> str:
        return self._find(name).dtype

    def _mapped(self, entry: SafetensorsEntry) -> NDArray[np.uint8]:
        """Return a tensor's bytes, backed by the file, so that packing reads them in parallel."""
        data = self._maps.get(entry.path)
        if data is None:
            with entry.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[entry.path] = data
        if entry.start + entry.num_bytes > len(data):
            raise CheckpointError(f"{entry.path} was cut short while it was open")
        return np.frombuffer(data, np.uint8, entry.num_bytes, entry.start)

    def release(self) -> None:
        """Free the maps of files; other arrays belong to the callers that read them."""
        for data in self._maps.values():
            data.madvise(mmap.MADV_DONTNEED)

    def check_shapes(self) -> tuple[str, ...]:
        """Return the names of the model's tensors.

        Raises CheckpointError if any is missing, of another shape than the config implies, or
        stored in a type other than F64, F32, F16 and BF16 that config.json does not declare.
        """
        shapes = {name: part.entry.shape for name, part in self._parts.items()}
        names = check_shapes(self._folder, self._config, shapes)
        for name in names:
            entry = self._parts[name].entry
            if isinstance(entry, SafetensorsEntry) and entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{self._folder}: tensor {name} is stored as {entry.dtype}; "
                    f"supported are {', '.join(DTYPES)}"
                )
        return names

    def _find(self, name: str) -> _Stored:
        try:
            return self._parts[name].entry
        except KeyError:
            raise CheckpointError(f"{self._folder} has no tensor {name}") from None

    def _ordered(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        order = row_order(self._config, name)
        return rows if order is None else rows[order]


def open_folder(path: Path) -> HFCheckpoint:
    """Open a folder. Raises CheckpointError as ``read_folder`` does, too."""
    return HFCheckpoint(read_folder(path))


class _Part(NamedTuple):
    """A tensor of ours inside the stored tensor that holds it."""

    entry: _Stored
    stored_name: str
    rows: slice | None


def _matrices_of(
    folder: Path, stored: Mapping[str, SafetensorsEntry], named: HFConfig
) -> Mapping[str, _Stored]:
    """Return the stored tensors, with those of a quantised matrix joined, and with a name for each
    expert's matrix where they are stored as one tensor."""
    unstacked = ARCHITECTURES[named.model.model_type].unstacked
    entries: Mapping[str, _Stored] = stored
    try:
        if named.quantisation is not None:
            entries = named.quantisation.take(stored)
        return entries if unstacked is None else unstacked(entries)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _main_dtype(entries: Mapping[str, _Stored], quantisation: Quantisation | None) -> str:
    """Return the format of most of the weights' bytes."""
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        # next to matrices of 4 bits an embedding of 16 may be larger than all of them
        if quantisation is None or not isinstance(entry, SafetensorsEntry):
            sizes[entry.dtype] += entry.num_bytes
    # a folder without the model's tensors is refused later
    main = sizes.most_common(1)[0][0] if sizes else "F32"
    return DTYPES.get(main, main)


def _parts_of(
    folder: Path, entries: Mapping[str, _Stored], config: ModelConfig
) -> dict[str, _Part]:
    """Return stored tensors under our names. Raises CheckpointError where a fused matrix has other
    rows than its parts, or two tensors have one name."""
    architecture = ARCHITECTURES[config.model_type]
    expected = expected_shapes(config)
    # folders of classes without a head omit the base model's prefix
    prefix = "model." if "embed_tokens.weight" in entries else ""
    parts: dict[str, _Part] = {}
    for stored, entry in entries.items():
        names = architecture.parts_of(stored if stored == _HEAD else prefix + stored)
        if len(names) > 1 and all(name in expected for name in names):
            found = _split(folder, stored, entry, [expected[name][0] for name in names])
        else:
            # a fused matrix of a layer outside the model keeps its name, by which it is refused
            names = names if len(names) == 1 else (stored,)
            found = [_Part(entry, stored, None)]
        for name, part in zip(names, found, strict=True):
            if name not in expected and _is_filler(stored, entries):
                continue
            if name in parts:
                raise CheckpointError(f"{folder}: two tensors are both {name}")
            parts[name] = part
    return parts


def _is_filler(stored: str, entries: Mapping[str, _Stored]) -> bool:
    """Whether it is the bias of zeros that AutoGPTQ writes for a matrix without a bias."""
    entry = entries[stored]
    beside = entries.get(f"{stored.removesuffix('.bias')}.weight")
    return (
        stored.endswith(".bias")
        and isinstance(entry, SafetensorsEntry)
        and not isinstance(beside, SafetensorsEntry | None)
        and not values_of(entry).any()
    )


def _split(folder: Path, name: str, entry: _Stored, counts: list[int]) -> list[_Part]:
    """Return the parts of a fused matrix, which are stacked by rows."""
    rows = entry.shape[0] if entry.shape else 0
    if rows != sum(counts):
        raise CheckpointError(
            f"{folder}: tensor {name} has {rows} rows, its config implies {sum(counts)}"
        )
    parts, first = [], 0
    for count in counts:
        span = slice(first, first + count)
        parts.append(_Part(entry.part(span), name, span))
        first += count
    return parts


# bytes of a matrix that are compared at a time
_BYTES: Final = 8 << 20


def _same_values(one: _Stored, other: _Stored) -> bool:
    """Return whether two stored matrices have the same values. Reads both, some rows at a time.

    A model that was fine-tuned with both apart may have been saved with a config that still ties
    them. As in transformers, both are then used as they are stored.
    """
    if one.shape != other.shape:
        return False
    step = max(1, _BYTES // max(1, 4 * one.shape[-1]))
    for start in range(0, one.shape[0], step):
        span = slice(start, min(start + step, one.shape[0]))
        if not _are_equal(one.part(span), other.part(span)):
            return False
    return True


def _are_equal(one: _Stored, other: _Stored) -> bool:
    if (
        isinstance(one, SafetensorsEntry)
        and isinstance(other, SafetensorsEntry)
        and one.dtype == other.dtype
        and read_data(one) == read_data(other)
    ):
        return True
    return np.array_equal(_values(one), _values(other))


def _values(matrix: _Stored) -> NDArray[np.float32]:
    return values_of(matrix) if isinstance(matrix, SafetensorsEntry) else matrix.values()
