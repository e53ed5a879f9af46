"""Encoders of BERT's shape, whatever the file format.

BERT, RoBERTa and XLM-RoBERTa have the same layers; RoBERTa's positions begin behind the padding's,
and its classifier has one layer more. Tensors have BERT's names, without the name of the base
model. ::

    embeddings.{word,position,token_type}_embeddings.weight, embeddings.LayerNorm
    encoder.layer.N.attention.self.{query,key,value}, .attention.output.{dense,LayerNorm}
    encoder.layer.N.intermediate.dense, .output.{dense,LayerNorm}
    pooler.dense, classifier           of a BERT that classifies
    classifier.{dense,out_proj}        of a RoBERTa that does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError

__all__ = ["EncoderConfig", "EncoderFiles"]

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


class EncoderFiles:
    """An opened folder or file, checked: the config is sane, and every tensor that it implies
    exists.

    Args:
        shapes: shapes of its tensors, by our names.
        read: returns the values of one of them.

    Raises:
        CheckpointError: a tensor that the config implies is missing, or has another shape.
    """

    def __init__(
        self,
        path: Path,
        config: EncoderConfig,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], NDArray[np.float32]],
    ) -> None:
        self.path = path
        self.config = config
        self._shapes = shapes
        self._read = read
        for name, shape in _shapes(config).items():
            if (found := shapes.get(name)) != shape:
                what = "is missing" if found is None else f"has shape {list(found)}"
                raise CheckpointError(
                    f"{path}: tensor {name} {what}, its config implies {list(shape)}"
                )

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return float32 values, a fresh array. Raises CheckpointError for an unknown name."""
        if name not in self._shapes:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._read(name)


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
