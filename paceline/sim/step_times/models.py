"""Shapes of models for profiles and rooflines, where there is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError

__all__ = ["ModelShape", "known_models"]

# counts that are 0 in models without experts, or without a file
_MAY_BE_NONE: Final = frozenset(
    {"num_experts", "experts_per_token", "expert_intermediate_size", "stored_bytes"}
)
# names of these numbers in the config.json of model families
_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that determine a decoder-only transformer's step time; all layers are alike."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # width of the feed-forward part; not used where experts replace it
    intermediate_size: int
    vocab_size: int
    # mixture of experts: experts of a layer, experts per token, and their width
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    # the output head is the embedding
    tied: bool = False
    # bytes of all weights in their file; 0: there is no file, and they take 16 bits each
    stored_bytes: int = 0
    # where the numbers are published
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_NONE else 1
            if type(value) is int and value < least:
                raise ConfigError(
                    f"model {self.name}: {field.name} is {value}, must be at least {least}"
                )
        if self.num_experts and not (
            1 <= self.experts_per_token <= self.num_experts and self.expert_intermediate_size
        ):
            raise ConfigError(
                f"model {self.name}: {self.num_experts} experts need experts_per_token from 1 to "
                f"{self.num_experts} and expert_intermediate_size above 0, got "
                f"{self.experts_per_token} and {self.expert_intermediate_size}"
            )

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert; 0 without experts."""
        return 3 * self.hidden_size * self.expert_intermediate_size if self.num_experts else 0

    @property
    def shared_parameters(self) -> int:
        """Weights of one layer that every token passes: all of them without experts."""
        if self.num_experts:
            return self.attention_parameters + self.hidden_size * self.num_experts
        return self.attention_parameters + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer, all experts included."""
        return self.shared_parameters + self.num_experts * self.expert_parameters

    @property
    def num_parameters(self) -> int:
        """Number of weights except norms and biases, which are less than a thousandth."""
        return self.num_layers * self.layer_parameters + self._embeddings

    @property
    def _embeddings(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes as stored, scales of quantised blocks included; 2 where there is no file."""
        return self.stored_bytes / self.num_parameters if self.stored_bytes else 2.0

    def parameters_per_engine(self, expert_shares: int = 1) -> float:
        """Return the weights of one engine where experts are spread over ``expert_shares``."""
        experts = self.num_experts * self.expert_parameters / expert_shares
        return self.num_layers * (self.shared_parameters + experts) + self._embeddings

    def experts_reached(self, num_tokens: float) -> float:
        """Return the mean number of a layer's experts that ``num_tokens`` tokens reach, when every
        expert is as likely as the next, the aim of training with a load-balancing loss."""
        missed = 1.0 - self.experts_per_token / self.num_experts
        return float(self.num_experts * (1.0 - missed**num_tokens))

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Return the bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def named(cls, name: str, models: Sequence[ModelShape] = ()) -> ModelShape:
        """Return a model of ``models`` or of ``models.json``, by its full name or the part after
        the slash, in any case. A shape whose name has no owner matches any owner.

        Raises:
            ConfigError: an unknown name; the message lists the known ones.
        """
        known = (*models, *known_models())
        asked = name.lower()
        for shape in known:
            has = shape.name.lower()
            if asked in (has, has.split("/")[-1]) or asked.split("/")[-1] == has:
                return shape
        listed = ", ".join(shape.name for shape in known)
        raise ConfigError(
            f"no shape is known for model {name!r}; give one with --model-shape FILE, or use one "
            f"of {listed}"
        )

    @classmethod
    def read(cls, path: Path) -> tuple[ModelShape, ...]:
        """Read the shapes in a file: an entry of ``models.json`` or a list of them, or a
        checkpoint's ``config.json``, named by its ``_name_or_path``, else by its folder
        (``config.json``) or its file.

        Raises:
            ConfigError: not such a file; the message names the missing number.
        """
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read model shapes from {path}: {error}") from error
        entries = data if isinstance(data, list) else [data]
        try:
            return tuple(_shape(entry, path) for entry in entries)
        except KeyError as error:
            raise ConfigError(
                f"{path} gives no {error.args[0]}: a model shape needs "
                "num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size and "
                "vocab_size, or is the config.json of a checkpoint"
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a file of model shapes: {error}") from error


def _shape(entry: Mapping[str, Any], path: Path) -> ModelShape:
    if "num_hidden_layers" in entry:
        return _of_checkpoint(entry, path)
    needed = [field.name for field in fields(ModelShape) if field.name not in _MAY_BE_NONE]
    for name in needed[: needed.index("tied")]:
        if name not in entry:
            raise KeyError(name)
    return ModelShape(**entry)


def _of_checkpoint(entry: Mapping[str, Any], path: Path) -> ModelShape:
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    hidden, heads = int(entry["hidden_size"]), int(entry["num_attention_heads"])
    experts = next((int(entry[key]) for key in _NUM_EXPERTS if entry.get(key)), 0)
    width = int(entry["intermediate_size"])
    return ModelShape(
        name=str(entry.get("_name_or_path") or name),
        num_layers=int(entry["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(entry.get("num_key_value_heads") or heads),
        head_dim=int(entry.get("head_dim") or hidden // heads),
        intermediate_size=width,
        vocab_size=int(entry["vocab_size"]),
        num_experts=experts,
        experts_per_token=int(entry["num_experts_per_tok"]) if experts else 0,
        # Mixtral's config gives its experts' width as that of the feed-forward part
        expert_intermediate_size=int(entry.get("moe_intermediate_size") or width) if experts else 0,
        tied=bool(entry.get("tie_word_embeddings")),
        source=str(path),
    )


def known_models() -> tuple[ModelShape, ...]:
    """Return every entry of ``models.json``."""
    data: list[dict[str, Any]] = json.loads(
        files("paceline.sim.step_times").joinpath("models.json").read_text()
    )
    return tuple(ModelShape(**entry) for entry in data)
