"""MiMo: Qwen2 with layers for further tokens, which ``checkpoints.mtp`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoints.architectures.base import Architecture
from paceline.checkpoints.hf_fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Mapping[str, Any]:
    # its class has these biases whatever the config says, as Qwen2's
    return {"qkv_bias": True, **fields.sliding_from("max_window_layers")}


ARCHITECTURE = Architecture(
    model_type="mimo",
    class_name="MiMoForCausalLM",
    title="MiMo",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    knobs=_knobs,
)
