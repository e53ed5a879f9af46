"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    return {"qkv_bias": True, **fields.sliding_from("max_window_layers")}


ARCHITECTURE = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    title="Qwen2, Qwen2.5, dense",
    gguf="qwen2",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    knobs=_knobs,
)
