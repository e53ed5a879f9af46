"""MTP (multi-token prediction) layers of a checkpoint, in addition to its model.

Each is a layer of the model's own kind over the embedding of a token and the features before it,
both normed, concatenated. Two layouts are read, by the model's architecture::

    MiMo                                     Qwen3-Next, Qwen3.5
    model.mtp_layers.N.*                     mtp.layers.N.*             a layer, as model.layers.N.*
    model.mtp_layers.N.token_layernorm       mtp.pre_fc_norm_embedding  [hidden], of the embedding
    model.mtp_layers.N.hidden_layernorm      mtp.pre_fc_norm_hidden     [hidden], of the features
    model.mtp_layers.N.input_proj            mtp.fc                     [hidden, 2 * hidden]
    model.mtp_layers.N.final_layernorm       mtp.norm                   [hidden], of the output
    the features, then the embedding         the embedding, then the features
    features: the sum of the model's layers  the same after the model's last norm
    no embedding of a token at position 1    its embedding

Embeddings and the head are the model's. The layers see all positions, even where the model's have
a window.

This module does not know how a layer is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.architectures import ARCHITECTURES
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.checkpoint import Checkpoint, expected_shapes
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.json_file import read_json_object
from paceline.checkpoints.weights.safetensors import DTYPES, SafetensorsEntry, values_of
from paceline.errors import CheckpointError

__all__ = ["MTPLayers", "MTPLayout", "Parts"]

_MOST_LAYERS: Final = 16
# fields of a config with the number of MTP layers
_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of a layer's tensors that a layer of the model lacks, with ``{}`` for its number; those
    without a number are shared."""

    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str

    def of(self, layer: int) -> Parts:
        names = (self.token_norm, self.hidden_norm, self.projection, self.final_norm)
        return Parts(*(name.format(layer) for name in names))

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            self.token_norm: (hidden,),
            self.hidden_norm: (hidden,),
            self.projection: (hidden, 2 * hidden),
            self.final_norm: (hidden,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayout:
    """Storage of MTP layers, and their inputs."""

    # name before a layer's number
    prefix: str
    parts: Parts
    # whether the features come before the embedding
    hidden_first: bool
    # whether the features have passed the model's last norm
    normed: bool
    # whether position 0 gets no embedding
    masks_first: bool


_MIMO: Final = MTPLayout(
    prefix="model.mtp_layers.",
    parts=Parts(
        "model.mtp_layers.{}.token_layernorm.weight",
        "model.mtp_layers.{}.hidden_layernorm.weight",
        "model.mtp_layers.{}.input_proj.weight",
        "model.mtp_layers.{}.final_layernorm.weight",
    ),
    hidden_first=True,
    normed=False,
    masks_first=True,
)
_QWEN: Final = MTPLayout(
    prefix="mtp.layers.",
    parts=Parts(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
    hidden_first=False,
    normed=True,
    masks_first=False,
)
# layouts by the model's model_type
_LAYOUTS: Final[Mapping[str, MTPLayout]] = MappingProxyType(
    {"mimo": _MIMO, "qwen3": _QWEN, "qwen3_moe": _QWEN}
)


class MTPLayers:
    """The layers of a checkpoint, checked: a ``backends.torch.weights.TensorSource`` with the names
    of a model's layers, and with ``parts`` under the names in the file.

    Raises:
        CheckpointError: it has none, or they differ from its model's kind or from what its config
            implies.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path: Path = checkpoint.path
        served = checkpoint.config
        layout = _LAYOUTS.get(served.model_type)
        if not isinstance(checkpoint, HFCheckpoint):
            raise CheckpointError(
                f"{self.path} is a GGUF file, of which MTP layers are not read: "
                "serve the safetensors folder"
            )
        if layout is None:
            stored = f", and this one holds {len(checkpoint.mtp)} tensors of such layers"
            raise CheckpointError(
                f"MTP layers are read together with {', '.join(_LAYOUTS)}, and {self.path} "
                f"is a {served.model_type}{stored if checkpoint.mtp else ''}"
            )
        self.layout: MTPLayout = layout
        stated = _stated(self.path)
        count = self._count(checkpoint.mtp, stated)
        self._entries = _renamed(checkpoint.mtp, layout, served.model_type)
        whole = replace(
            served, num_hidden_layers=count, sliding_window=None, sliding_layers=(),
            sliding_rope=None, unrotated_layers=(), dense_layers=(),
        )  # fmt: skip
        # a model with experts may have MTP layers without
        dense = [n for n in range(count) if f"model.layers.{n}.mlp.router.weight" not in self]
        self.config: ModelConfig = replace(whole, dense_layers=tuple(dense))
        self.shapes: Mapping[str, tuple[int, ...]] = self._expected()
        self._check()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def num_values(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as a fresh array."""
        return values_of(self._entries[name])

    def release(self) -> None:
        """Do nothing: no data is kept."""

    def _count(self, entries: Mapping[str, SafetensorsEntry], stated: int | None) -> int:
        pattern = re.compile(re.escape(self.layout.prefix) + r"([0-9]+)\.")
        found = {int(match[1]) for name in entries if (match := pattern.match(name))}
        if not found:
            says = "" if not stated else f", though its config.json names {stated}"
            raise CheckpointError(f"{self.path} has no MTP layers ({self.layout.prefix}*){says}")
        count = len(found)
        if found != set(range(count)) or count > _MOST_LAYERS:
            raise CheckpointError(
                f"{self.path} has MTP layers {', '.join(map(str, sorted(found)))}, "
                f"must be 0 and on without a gap, {_MOST_LAYERS} at most"
            )
        if stated and stated != count:
            raise CheckpointError(
                f"{self.path} has {count} MTP layers, its config.json names {stated}"
            )
        return count

    def _expected(self) -> dict[str, tuple[int, ...]]:
        shapes = {
            name: shape
            for name, shape in expected_shapes(self.config).items()
            if name.startswith("model.layers.")
        }
        for layer in range(self.num_layers):
            shapes |= self.layout.parts.of(layer).shapes(self.config.hidden_size)
        return shapes

    def _check(self) -> None:
        missing = [name for name in self.shapes if name not in self._entries]
        extra = sorted(self._entries.keys() - self.shapes)
        for what, names in (("lack", missing), ("have in excess", extra)):
            if names:
                raise CheckpointError(
                    f"{self.path}: its {self.num_layers} MTP layers {what} "
                    f"{len(names)} tensors, e.g. {', '.join(map(self._stored, names[:3]))}"
                )
        for name, shape in self.shapes.items():
            entry = self._entries[name]
            if entry.shape != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {self._stored(name)} has shape {list(entry.shape)}, its "
                    f"config implies {list(shape)}"
                )
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{self.path}: tensor {self._stored(name)} is stored as {entry.dtype}; of "
                    f"MTP layers these are read: {', '.join(DTYPES)}"
                )

    def _stored(self, name: str) -> str:
        """Return a tensor's name in the file, for users."""
        return name.replace("model.layers.", self.layout.prefix, 1)


def _stated(path: Path) -> int | None:
    raw: Mapping[str, Any] = read_json_object(path / "config.json") or {}
    for name in _COUNTS:
        value = raw.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{path / 'config.json'}: {name} is {value!r:.80}")
            return value
    return None


def _renamed(
    entries: Mapping[str, SafetensorsEntry], layout: MTPLayout, model_type: str
) -> dict[str, SafetensorsEntry]:
    """Rename tensors to those of a model's layers; other tensors keep their names."""
    architecture = ARCHITECTURES[model_type]
    pattern = re.compile(re.escape(layout.prefix) + r"([0-9]+)\.(.+)")
    found: dict[str, SafetensorsEntry] = {}
    for name, entry in entries.items():
        match = pattern.fullmatch(name)
        if match is None or name in layout.parts.of(int(match[1])).shapes(1):
            found[name] = entry
            continue
        names = architecture.parts_of(f"model.layers.{match[1]}.{match[2]}")
        # a matrix that holds several is not split, and is refused by its name
        found[names[0] if len(names) == 1 else name] = entry
    return found
