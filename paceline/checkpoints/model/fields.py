"""Typed access to the fields of config.json, for the readers of architectures, and a file's ids of
special tokens.

A missing field has the default of the architecture's configuration class in transformers, because a
config written by transformers leaves it out. Every reader raises CheckpointError naming the field.

Converters write -1, 2^32 - 1 or the id of a token that was cut off for "there is none". Such an id
counts as absent, with a warning. A model whose only end of sequence is absent would never end an
answer, so it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from paceline.checkpoints.model.config import RopeConfig
from paceline.errors import CheckpointError

__all__ = ["Fields", "gguf_special_id", "ids_within", "token_ids", "warn_once"]

# longest list of layers made here; a config with more layers is refused later
_MOST_LAYERS: Final = 1024
_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})
_NULL_IS_NONE: Final = frozenset(
    {
        "sliding_window",
        "eos_token_id",
        "bos_token_id",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)


class Fields:
    """The fields of one config.json over the defaults of its architecture."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        # null means the default, as in transformers, except where null itself means "none"
        given = {
            key: value for key, value in raw.items() if value is not None or key in _NULL_IS_NONE
        }
        self.raw: Mapping[str, Any] = {**defaults, **given}

    @property
    def layers(self) -> range:
        """Indices of the layers; empty where the config names more than any model has."""
        count = self.whole("num_hidden_layers")
        return range(count if count <= _MOST_LAYERS else 0)

    def layer_kinds(self, default: Sequence[str]) -> Sequence[str]:
        """Return ``layer_types``: "full_attention" or "sliding_attention" for each layer."""
        kinds, layers = self.raw.get("layer_types"), self.whole("num_hidden_layers")
        if kinds is None:
            return default
        if not isinstance(kinds, list) or len(kinds) != layers:
            found = len(kinds) if isinstance(kinds, list) else repr(kinds)[:40]
            raise CheckpointError(f"layer_types has {found} entries for {layers} layers")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise CheckpointError(f"layer_types names {kind!r:.40}, which is not supported")
        return kinds

    def sliding(self, default: Sequence[str]) -> dict[str, Any]:
        """Return ``sliding_window`` and ``sliding_layers`` of ModelConfig, by ``layer_kinds``."""
        kinds = self.layer_kinds(default)
        chosen = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if not chosen or self.raw.get("sliding_window") is None:
            return {}
        return {"sliding_window": self.whole("sliding_window"), "sliding_layers": chosen}

    def sliding_from(self, first_field: str) -> dict[str, Any]:
        """Return the same where a field names the first such layer and a flag enables windows."""
        if self.raw.get("sliding_window") is None or not self.flag("use_sliding_window"):
            return {}
        first = self.whole(first_field) if self.raw.get("layer_types") is None else 0
        return self.sliding(
            ["sliding_attention" if i >= first else "full_attention" for i in self.layers]
        )

    def head_dim(self, hidden: int, heads: int) -> int:
        if "head_dim" in self.raw:
            return self.whole("head_dim")
        if heads < 1 or hidden % heads:
            raise CheckpointError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, "
                "and there is no head_dim"
            )
        return hidden // heads

    def rope_parameters(self) -> dict[str, Any]:
        """Return the config's rotary embedding as one object, under either of its names."""
        rope: dict[str, Any] = {}
        # transformers 5 prefers rope_scaling, the older name
        for key in ("rope_parameters", "rope_scaling"):
            value = self.raw.get(key, {})
            if not isinstance(value, dict):
                raise CheckpointError(f"{key} is {value!r:.80}, must be an object")
            rope = value or rope
        return rope

    def rope(
        self,
        parameters: Mapping[str, Any] | None = None,
        *,
        aliases: Mapping[str, str] = _NO_ALIASES,
    ) -> RopeConfig:
        """Return the rotary embedding by ``parameters``; None: by ``rope_parameters()``.

        ``aliases`` maps an architecture's names of rope types to other ones.
        """
        given = self.rope_parameters() if parameters is None else parameters
        if any(isinstance(value, dict) for value in given.values()):
            raise CheckpointError("rope parameters that differ between layers are not supported")
        rope = {key: value for key, value in given.items() if value is not None}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str):
            raise CheckpointError(f"rope_type is {kind!r:.40}, must be a string")
        kind = aliases.get(kind, kind)
        positions = self.whole("max_position_embeddings")
        original = None
        if kind in ("llama3", "yarn", "longrope"):
            # a value outside the rope parameters wins (Phi-3 wrote it there)
            places: Mapping[str, Any] = {"original_max_position_embeddings": positions, **rope}
            if "original_max_position_embeddings" in self.raw:
                places = self.raw
            original = _whole(places, "original_max_position_embeddings")
        factor = 1.0
        if kind == "longrope" and "factor" not in rope and original:
            factor = positions / original
        elif kind != "default":
            factor = self.number(rope, "factor")
        theta = self.number(self.raw, "rope_theta", 10000.0)
        return RopeConfig(
            theta=self.number(rope, "rope_theta", theta),
            kind=kind,
            factor=factor,
            low_freq_factor=self.number(rope, "low_freq_factor", 1.0),
            high_freq_factor=self.number(rope, "high_freq_factor", 4.0),
            original_max_position=original,
            attention_factor=self.optional(rope, "attention_factor"),
            beta_fast=self.number(rope, "beta_fast", 32.0),
            beta_slow=self.number(rope, "beta_slow", 1.0),
            mscale=self.optional(rope, "mscale"),
            mscale_all_dim=self.optional(rope, "mscale_all_dim"),
            truncate=_flag(rope, "truncate", True),
            short_factor=self.factors(rope, "short_factor"),
            long_factor=self.factors(rope, "long_factor"),
        )

    def partial_rotary(self) -> float:
        """Return the share of a head's dimensions that is rotated."""
        return self.number({**self.raw, **self.rope_parameters()}, "partial_rotary_factor", 1.0)

    def factors(self, rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
        values = rope.get(key, [])
        if not isinstance(values, list) or len(values) > 4096:
            raise CheckpointError(f"rope {key} is {values!r:.80}, must be a list of numbers")
        return tuple(self.number({key: value}, key) for value in values)

    def whole(self, key: str, default: int | None = None) -> int:
        return _whole(self.raw, key, default)

    def flag(self, key: str) -> bool:
        return _flag(self.raw, key, False)

    def optional(self, source: Mapping[str, Any], key: str) -> float | None:
        return self.number(source, key) if key in source else None

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None where null turns the field off."""
        return None if self.raw.get(key) is None else self.number(self.raw, key)

    def number(self, source: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = source.get(key, default)
        if value is None or type(value) not in (int, float):
            found = "missing" if value is None else f"{value!r:.80}"
            raise CheckpointError(f"{key} is {found}, must be a number")
        try:
            return float(value)
        except OverflowError:
            raise CheckpointError(f"{key} is too large to be a number") from None


def token_ids(value: Any, key: str) -> frozenset[int]:
    """Return one id, a list of ids or null as a set; ids may lie outside the vocabulary.

    Raises:
        CheckpointError: anything else.
    """
    if value is None:
        return frozenset()
    values = value if isinstance(value, list) else [value]
    if len(values) > 1024 or not all(type(item) is int for item in values):
        raise CheckpointError(f"{key} is {value!r:.80}, must be a token id or a list of them")
    return frozenset(values)


def _whole(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = source.get(key, default)
    if value is None or type(value) is not int:
        found = "missing" if value is None else f"{value!r:.80}"
        raise CheckpointError(f"{key} is {found}, must be a whole number")
    return value


def _flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    value = source.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r:.80}, must be true or false")
    return value


_log = logging.getLogger(__name__)


@cache
def warn_once(message: str) -> None:
    """Log a warning about a file once, though several readers in one process may find it."""
    _log.warning("%s", message)


def gguf_special_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """Return the id of ``tokenizer.ggml.NAME_token_id`` in a vocabulary of ``count`` tokens; None:
    it is absent.

    Raises:
        CheckpointError: it is not a whole number.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if type(token_id) is not int:
        raise CheckpointError(f"{key} is {token_id!r:.40} of {count} tokens")
    return next(iter(ids_within((token_id,), key, count)), None)


def ids_within(ids: Iterable[int], key: str, count: int) -> frozenset[int]:
    """Return the ``ids`` that are in a vocabulary of ``count`` tokens; ``key`` names them in the
    warning about the others."""
    given = frozenset(ids)
    found = frozenset(token_id for token_id in given if 0 <= token_id < count)
    for token_id in sorted(given - found):
        warn_once(f"{key} is {token_id}, the vocabulary has {count} entries: it counts as absent")
    return found
