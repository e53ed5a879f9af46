"""A GGUF file as a checkpoint: keys to ModelConfig, names and row order to Hugging Face's.

The one transformation besides renaming and splitting: llama.cpp rotates neighbouring pairs of a
head's dimensions for ``llama`` and some others (``Architecture.gguf_interleaved``), so its
converter interleaves the rows of q and k. Hugging Face, and every compute path here, rotates the
first half against the second, so the interleaving is undone here::

    GGUF rows of one head:   a0 b0 a1 b1 a2 b2 ...     (pair i = rows 2i, 2i+1)
    returned rows:           a0 a1 a2 ... b0 b1 b2 ... (pair i = rows i, i + head_dim/2)

The other architectures are stored half-split already. Quantisation runs along a row, so moving
whole rows is exact for quantised tensors too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.architectures import ARCHITECTURES, Architecture
from paceline.checkpoints.gguf.config import GGUFConfigReader, find_architecture
from paceline.checkpoints.gguf.container import GGUFFile, GGUFTensor, GGUFType
from paceline.checkpoints.gguf.data import GGUFData
from paceline.checkpoints.gguf.shards import read_gguf_parts
from paceline.checkpoints.model.checkpoint import check_shapes, expected_shapes, row_order
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError

__all__ = ["GGUFCheckpoint", "open_gguf", "stored_name", "stored_rows"]

_T = TypeVar("_T", bound=np.generic)

_NOT_WEIGHTS: Final = {
    GGUFType[name] for name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
}
_PLAIN: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    # matrices of all experts, concatenated
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_LAYER_NAME: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_PLAIN_NAME: Final = re.compile(r"([a-z_]+)\.(weight|bias)")
_OUR_NAME: Final = re.compile(r"model\.layers\.([0-9]+)\.([a-z0-9_.]+)\.(weight|bias)")
_EXPERT: Final = re.compile(r"\.experts\.[0-9]+\.")
# tensors read as part of the config
_ROPE_TENSORS: Final = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


def _our_name(name: str, parts: Mapping[str, str]) -> str:
    """Return our name of a GGUF tensor, by the names in a layer; an unknown one as it is."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
    elif (match := _PLAIN_NAME.fullmatch(name)) and match[1] in _PLAIN:
        return f"{_PLAIN[match[1]]}.{match[2]}"
    return name


def name_in_layer(name: str, architecture: Architecture | None) -> tuple[int, str] | None:
    """Return layer and module of a layer's weight, by its GGUF name; None for others."""
    match = _LAYER_NAME.fullmatch(name)
    names = {**_IN_LAYER, **(architecture.gguf_names if architecture else {})}
    if match is None or match[3] != "weight" or match[2] not in names:
        return None
    return int(match[1]), names[match[2]]


def deinterleave(config: ModelConfig, name: str, rows: NDArray[_T]) -> NDArray[_T]:
    """Return the rows of a tensor in the order of Hugging Face; llama.cpp interleaves the halves of
    each head's queries and keys."""
    if ".self_attn.q_proj." in name:
        heads = config.num_attention_heads
    elif ".self_attn.k_proj." in name:
        heads = config.num_key_value_heads
    else:
        return rows
    half = config.head_dim // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


class GGUFCheckpoint:
    """An opened ``.gguf`` file, with all parts of a split one; see ``model.checkpoint`` for the
    contract.

    Args:
        file: its header, of all parts where it is split.
        paths: paths of the parts.

    Raises:
        CheckpointError: of an architecture that is not supported, or with metadata and tensors that
            disagree.
    """

    def __init__(self, file: GGUFFile, paths: tuple[Path, ...]) -> None:
        self._file, path = file, file.path
        self._data = GGUFData(paths)
        self._tensors: dict[str, GGUFTensor] = {}
        architecture = find_architecture(self._file.metadata)
        names = {**_IN_LAYER, **(architecture.gguf_names if architecture else {})}
        self._interleaved = architecture is not None and architecture.gguf_interleaved
        for tensor in self._file.tensors.values():
            name = _our_name(tensor.name, names)
            if name in self._tensors:
                raise CheckpointError(f"{path}: two tensors are both {name}")
            self._tensors[name] = tensor
        try:
            reader = GGUFConfigReader(self._file, self._tensors, self._data.values, architecture)
            self._config = reader.read()
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(
                text if text.startswith(str(path)) else f"{path}: {text}"
            ) from None
        self._split_fused()
        self._names = self.check_shapes()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Every key of the file; numeric arrays as ``array.array``, string arrays as lists."""
        return MappingProxyType(self._file.metadata)

    def tensor_names(self) -> tuple[str, ...]:
        return self._names

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def tensor_type(self, name: str) -> str:
        """Return the stored type, such as "Q4_1"."""
        return self._find(name).type.name

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._reorder(name, self._data.values(self._find(name)))

    def raw_tensor(self, name: str) -> tuple[NDArray[np.uint8], str]:
        """Return stored rows, see ``model.checkpoint``. Read-only and backed by the file, except
        for q and k of the ``llama`` architecture, which are copies."""
        tensor = self._find(name)
        if len(tensor.shape) != 2:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}; only matrices have rows")
        return self._reorder(name, self._data.rows(tensor)), tensor.type.name

    @property
    def file(self) -> GGUFFile:
        """The header: metadata, and the tensors under the names that the file has for them."""
        return self._file

    def parts_of(self, stored: str) -> list[str]:
        """Return our names of the matrices that a tensor of the file holds, in its order; none for
        one that is read as part of the config."""
        parts = [(part.start, name) for name, part in self._tensors.items() if part.name == stored]
        return [name for _, name in sorted(parts) if name in self._names]

    def stored_rows(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        """Put the rows of a matrix in the order in which the file has them, as ``tensor`` puts the
        file's in ours."""
        return stored_rows(self._config, self._interleaved, name, rows)

    def stored_bytes(self, stored: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor of the file, [rows, bytes of a row], backed by the file."""
        tensor = self._file.tensors[stored]
        return self._data.rows(tensor)

    def release(self) -> None:
        self._data.release()

    def forget_vocabulary(self) -> None:
        """Drop texts and merges of tokens, some 20 MB that computing does not need. ``metadata``
        lacks them afterwards."""
        for name in ("tokens", "merges", "scores", "token_type"):
            self._file.metadata.pop(f"tokenizer.ggml.{name}", None)

    def check_shapes(self) -> tuple[str, ...]:
        """Return the names of the model's tensors.

        Raises CheckpointError if any is missing, of another shape than the config implies, or
        stored in a type that holds no weights (integers, an activation format).
        """
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for name in _ROPE_TENSORS:
            shapes.pop(name, None)
        names = check_shapes(self.path, self._config, shapes)
        for name in names:
            if (kind := self._tensors[name].type) in _NOT_WEIGHTS:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is stored as {kind.name}, not a type of weights"
                )
        return names

    def _split_fused(self) -> None:
        """Name the parts of fused matrices, and each of concatenated experts. A matrix whose size
        differs from its parts' keeps its name, and is refused."""
        expected = expected_shapes(self._config)
        architecture = ARCHITECTURES[self._config.model_type]
        for name, tensor in list(self._tensors.items()):
            experts = range(self._config.num_experts)
            parts: Sequence[str] = architecture.parts_of(name)
            if "*" in name:
                parts = [name.replace("*", str(expert)) for expert in experts]
            if len(parts) < 2 and "*" not in name:
                continue
            shapes = [expected[part] for part in parts if part in expected]
            rows = [shape[0] for shape in shapes]
            inner = shapes[0][1:] if shapes else ()
            whole = (len(parts), *rows[:1], *inner) if "*" in name else (sum(rows), *inner)
            if len(shapes) < len(parts) or tensor.shape != whole:
                continue
            del self._tensors[name]
            start, row_bytes = tensor.start, tensor.num_bytes // sum(rows)
            for part, count in zip(parts, rows, strict=True):
                if part in self._tensors:
                    raise CheckpointError(f"{self.path}: two tensors are both {part}")
                self._tensors[part] = replace(
                    tensor,
                    shape=(count, *inner),
                    start=start,
                    num_bytes=count * row_bytes,
                )
                start += count * row_bytes

    def _find(self, name: str) -> GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _reorder(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        return _in_our_order(self._config, self._interleaved, name, rows)


def _in_our_order(
    config: ModelConfig, interleaved: bool, name: str, rows: NDArray[_T]
) -> NDArray[_T]:
    order = row_order(config, name)
    if order is not None:
        return rows[order]
    return deinterleave(config, name, rows) if interleaved else rows


def stored_rows(
    config: ModelConfig, interleaved: bool, name: str, rows: NDArray[_T]
) -> NDArray[_T]:
    """Put the rows of a tensor of ours in the order that a file has; see the module.
    ``interleaved``: the architecture's ``gguf_interleaved``."""
    ordered = np.empty_like(rows)
    ordered[_in_our_order(config, interleaved, name, np.arange(len(rows)))] = rows
    return ordered


def stored_name(architecture: Architecture, name: str) -> str:
    """Return the name that files have for a tensor of ours. The matrices of all experts are one
    tensor. Raises CheckpointError for a tensor that files of the architecture do not have."""
    match = _OUR_NAME.fullmatch(name)
    parts = {ours: theirs for theirs, ours in {**_IN_LAYER, **architecture.gguf_names}.items()}
    if match and (part := parts.get(_EXPERT.sub(".experts.*.", match[2]))):
        return f"blk.{match[1]}.{part}.{match[3]}"
    base, _, kind = name.rpartition(".")
    for theirs, ours in _PLAIN.items():
        if ours == base:
            return f"{theirs}.{kind}"
    raise CheckpointError(f"GGUF files of {architecture.title} have no tensor for {name}")


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a file and its other parts. Raises CheckpointError as ``read_gguf_parts`` does, too."""
    return GGUFCheckpoint(*read_gguf_parts(path))
