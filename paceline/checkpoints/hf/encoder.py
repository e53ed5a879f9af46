"""Encoders of BERT's shape, from a Hugging Face folder: BERT, RoBERTa and XLM-RoBERTa.

The three have the same layers; RoBERTa's positions begin behind the padding's, and its classifier
has one layer more. Tensors have BERT's names, without the name of the base model. ::

    embeddings.{word,position,token_type}_embeddings.weight, embeddings.LayerNorm
    encoder.layer.N.attention.self.{query,key,value}, .attention.output.{dense,LayerNorm}
    encoder.layer.N.intermediate.dense, .output.{dense,LayerNorm}
    pooler.dense, classifier           of a BERT that classifies
    classifier.{dense,out_proj}        of a RoBERTa that does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.hf.folder import HFFolder
from paceline.checkpoints.model.fields import Fields
from paceline.checkpoints.weights.safetensors import SafetensorsEntry, read_entries, values_of
from paceline.errors import CheckpointError

__all__ = ["ENCODERS", "EncoderCheckpoint", "EncoderConfig", "EncoderFiles", "check_encoder"]

# model_type -> name of the base model in checkpoints with a head
ENCODERS: Final[Mapping[str, str]] = MappingProxyType(
    {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
)
# activation names -> functions
_ACTIVATIONS: Final = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
# transformers' defaults, for fields that a config leaves out
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
_ROBERTA_DEFAULTS: Final[Mapping[str, Any]] = {**_DEFAULTS, "vocab_size": 50265}
_MOST: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder; the names are Hugging Face's. Raises CheckpointError for sizes out of reason."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    # rows of the table of positions, and the row of a prompt's first token
    max_position_embeddings: int
    first_position: int
    type_vocab_size: int
    layer_norm_eps: float
    # "gelu", "gelu_tanh" or "relu"
    activation: str

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size", "max_position_embeddings", "type_vocab_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if not 1 <= value <= _MOST:
                raise CheckpointError(f"{name} is {value}, must be 1 to {_MOST}")
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.longest < 1:
            raise CheckpointError(
                f"max_position_embeddings={self.max_position_embeddings} leaves no position: the "
                f"first one used is {self.first_position}"
            )

    @property
    def longest(self) -> int:
        """Longest prompt, tokens."""
        return self.max_position_embeddings - self.first_position


class EncoderFiles(Protocol):
    """An opened folder or file, checked: the config is sane, and every tensor that it implies
    exists."""

    path: Path
    config: EncoderConfig

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return float32 values, a fresh array. Raises CheckpointError for an unknown name."""


class EncoderCheckpoint:
    """An opened folder, an ``EncoderFiles``.

    Raises:
        CheckpointError: a malformed folder.
    """

    def __init__(self, folder: HFFolder) -> None:
        self.path = folder.path
        try:
            self.config = _config_of(folder.config or {})
        except CheckpointError as error:
            raise CheckpointError(f"{folder.path / 'config.json'}: {error}") from None
        prefix = ENCODERS[self.config.model_type]
        self._entries = {
            _our_name(name, prefix): entry for name, entry in read_entries(folder.path).items()
        }
        found = {name: entry.shape for name, entry in self._entries.items()}
        check_encoder(folder.path, self.config, found)

    def has(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return float32 values, a fresh array. Raises CheckpointError for an unknown name."""
        return values_of(self._entry(name))

    def _entry(self, name: str) -> SafetensorsEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None


def check_encoder(path: Path, config: EncoderConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError where a tensor that the config implies is missing, or has another
    shape."""
    for name, shape in _shapes(config).items():
        if found.get(name) != shape:
            what = f"has shape {list(found[name])}" if name in found else "is missing"
            raise CheckpointError(f"{path}: tensor {name} {what}, its config implies {list(shape)}")


def _our_name(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    # the first BERT spelt its norms this way
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _config_of(raw: Mapping[str, Any]) -> EncoderConfig:
    model_type = str(raw.get("model_type"))
    if model_type not in ENCODERS:
        raise CheckpointError(
            f"model_type {model_type!r:.40} is not supported as an encoder; these are: "
            f"{', '.join(ENCODERS)}"
        )
    is_bert = model_type == "bert"
    fields = Fields(raw, _DEFAULTS if is_bert else _ROBERTA_DEFAULTS)
    kind = fields.raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise CheckpointError(f"position_embedding_type {kind!r:.40} is not supported")
    activation = fields.raw.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {activation!r:.40} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise CheckpointError(f"{name}=true is not supported: this would be no encoder")
    return EncoderConfig(
        model_type=model_type,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=fields.whole("num_attention_heads"),
        intermediate_size=fields.whole("intermediate_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        first_position=0 if is_bert else fields.whole("pad_token_id", 1) + 1,
        type_vocab_size=fields.whole("type_vocab_size"),
        layer_norm_eps=fields.number(fields.raw, "layer_norm_eps"),
        activation=_ACTIVATIONS[activation],
    )


def _shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    norm("embeddings.LayerNorm")
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{prefix}.attention.self.{part}", hidden, hidden)
        linear(f"{prefix}.attention.output.dense", hidden, hidden)
        norm(f"{prefix}.attention.output.LayerNorm")
        linear(f"{prefix}.intermediate.dense", inner, hidden)
        linear(f"{prefix}.output.dense", hidden, inner)
        norm(f"{prefix}.output.LayerNorm")
    return shapes
