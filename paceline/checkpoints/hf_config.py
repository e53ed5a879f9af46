"""config.json and generation_config.json of a Hugging Face folder to ModelConfig.

Missing fields get the defaults of transformers' configuration classes, because a config written by
transformers leaves them out. Both spellings of rotary embedding are read: ``rope_theta`` with
``rope_scaling``, and ``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.config import ModelConfig, RopeConfig
from paceline.checkpoints.json_file import read_json_object
from paceline.core.errors import CheckpointError

__all__ = ["SUPPORTED_ARCHITECTURES", "read_hf_config"]

_MODEL_TYPES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED_ARCHITECTURES: Final = tuple(_MODEL_TYPES)

# model_type -> defaults of its configuration class
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}


def read_hf_config(folder: Path, stored_dtype: str) -> ModelConfig:
    """The architecture described by ``folder``; ``stored_dtype`` is that of its weights.

    Raises:
        CheckpointError: no config.json, an unsupported architecture, code of its own, quantised
            weights, or a value of the wrong type or size.
    """
    path = folder / "config.json"
    raw = read_json_object(path)
    if raw is None:
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a Hugging Face checkpoint"
        )
    generation = read_json_object(folder / "generation_config.json") or {}
    try:
        return _Fields(raw).model(generation, stored_dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


class _Fields:
    """Typed access to config.json."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.model_type = _model_type(raw)
        # a null field means the default, as in transformers, except where null itself says "none"
        given = {
            key: value
            for key, value in raw.items()
            if value is not None or key in ("sliding_window", "eos_token_id", "bos_token_id")
        }
        self.raw = {**_DEFAULTS[self.model_type], **given}

    def model(self, generation: Mapping[str, Any], stored_dtype: str) -> ModelConfig:
        if "quantization_config" in self.raw:
            raise CheckpointError(
                "the weights are quantised (quantization_config); use an unquantised checkpoint "
                "or a GGUF file"
            )
        if (activation := self.raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise CheckpointError(f"hidden_act {activation!r} is not supported, only silu")
        hidden = self.whole("hidden_size")
        heads = self.whole("num_attention_heads")
        layers = self.whole("num_hidden_layers")
        attention_bias = self.flag("attention_bias") and self.model_type in ("llama", "qwen3")
        window, sliding_layers = self.sliding(layers)
        eos = token_ids(self.raw.get("eos_token_id"), "eos_token_id")
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.whole("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self.whole("num_key_value_heads", heads),
            head_dim=self.head_dim(hidden, heads),
            max_position_embeddings=self.whole("max_position_embeddings"),
            rms_norm_eps=self.number(self.raw, "rms_norm_eps", 1e-6),
            rope=self.rope(),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or self.model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=self.flag("mlp_bias") and self.model_type == "llama",
            qk_norm=self.model_type == "qwen3",
            sliding_window=window,
            sliding_layers=sliding_layers,
            eos_token_ids=eos | token_ids(generation.get("eos_token_id"), "eos_token_id"),
            bos_token_id=next(iter(token_ids(self.raw.get("bos_token_id"), "bos_token_id")), None),
            stored_dtype=stored_dtype,
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

    def sliding(self, layers: int) -> tuple[int | None, tuple[int, ...]]:
        """(window, layers that have it); (None, ()) when attention is full everywhere."""
        none: tuple[None, tuple[int, ...]] = (None, ())
        if self.model_type == "llama" or self.raw.get("sliding_window") is None:
            return none
        if self.model_type == "mistral":
            chosen = range(layers) if layers <= 1024 else range(0)
            return self.whole("sliding_window"), tuple(chosen)
        if not self.flag("use_sliding_window"):
            return none
        kinds = self.raw.get("layer_types")
        if kinds is None:
            first = self.whole("max_window_layers")
            chosen_layers = tuple(range(first, min(layers, 1024)))
        elif isinstance(kinds, list) and len(kinds) == layers:
            for kind in kinds:
                if kind not in ("full_attention", "sliding_attention"):
                    raise CheckpointError(f"layer_types names {kind!r:.40}, which is not supported")
            chosen_layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        else:
            found = len(kinds) if isinstance(kinds, list) else repr(kinds)[:40]
            raise CheckpointError(f"layer_types has {found} entries for {layers} layers")
        return (self.whole("sliding_window"), chosen_layers) if chosen_layers else none

    def rope(self) -> RopeConfig:
        rope: dict[str, Any] = {}
        # transformers 5 lets rope_scaling, the older name, win
        for key in ("rope_parameters", "rope_scaling"):
            value = self.raw.get(key, {})
            if not isinstance(value, dict):
                raise CheckpointError(f"{key} is {value!r:.80}, must be an object")
            rope = value or rope
        if any(isinstance(value, dict) for value in rope.values()):
            raise CheckpointError("rope parameters that differ between layers are not supported")
        rope = {key: value for key, value in rope.items() if value is not None}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str):
            raise CheckpointError(f"rope_type is {kind!r:.40}, must be a string")
        partial = self.number({**self.raw, **rope}, "partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise CheckpointError(f"partial_rotary_factor={partial} is not supported, only 1.0")
        positions = self.whole("max_position_embeddings")
        original = None
        if kind in ("llama3", "yarn", "longrope"):
            # a value beside the rope parameters wins (Phi-3 wrote it there)
            places = {"original_max_position_embeddings": positions, **rope}
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

    def number(self, source: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = source.get(key, default)
        if value is None or type(value) not in (int, float):
            found = "missing" if value is None else f"{value!r:.80}"
            raise CheckpointError(f"{key} is {found}, must be a number")
        try:
            return float(value)
        except OverflowError:
            raise CheckpointError(f"{key} is too large to be a number") from None


def _model_type(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else None
    if names is None:
        # configs saved from a bare config object carry no architectures
        model_type = raw.get("model_type")
        if model_type in _DEFAULTS and isinstance(model_type, str):
            return model_type
        found = f"model_type {model_type!r:.80}"
    else:
        if isinstance(names[0], str) and names[0] in _MODEL_TYPES:
            return _MODEL_TYPES[names[0]]
        found = f"architecture {names[0]!r:.80}"
    own_code = (
        " It would need Python code from the checkpoint (auto_map), which Paceline never runs."
        if "auto_map" in raw
        else ""
    )
    raise CheckpointError(
        f"{found} is not supported; these are: {', '.join(SUPPORTED_ARCHITECTURES)}.{own_code}"
    )


def token_ids(value: Any, key: str) -> frozenset[int]:
    """One id, a list of ids or null, as a set.

    Raises:
        CheckpointError: anything else.
    """
    if value is None:
        return frozenset()
    values = value if isinstance(value, list) else [value]
    if len(values) > 1024 or not all(type(item) is int and item >= 0 for item in values):
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
