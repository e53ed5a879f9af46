"""Shapes of models that profiles and rooflines are made for, where no checkpoint is at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from paceline.core.errors import ConfigError

__all__ = ["ModelShape", "known_models"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a decoder-only dense transformer's step time depends on."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    # the output head is the embedding
    tied: bool = False
    # where the numbers are published
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"model {self.name}: {field.name} is {value}, must be at least 1")

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """All weights but norms and biases, which are less than a thousandth."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """A model of ``models.json``, by its full name or the part after the slash.

        Raises:
            ConfigError: not there; the message lists what is.
        """
        for shape in known_models():
            if name.lower() in (shape.name.lower(), shape.name.split("/")[-1].lower()):
                return shape
        listed = ", ".join(shape.name for shape in known_models())
        raise ConfigError(f"no shape is known for model {name!r}; known: {listed}")


def known_models() -> tuple[ModelShape, ...]:
    """Every entry of ``models.json``."""
    data: list[dict[str, Any]] = json.loads(
        files("paceline.sim.step_times").joinpath("models.json").read_text()
    )
    return tuple(ModelShape(**entry) for entry in data)
