"""Qwen3, dense: norms on each head's queries and keys."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    window = fields.sliding_from("max_window_layers")
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, **window}


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    return {"qk_norm": True}


ARCHITECTURE = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    title="Qwen3, dense",
    gguf="qwen3",
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    knobs=_knobs,
)
