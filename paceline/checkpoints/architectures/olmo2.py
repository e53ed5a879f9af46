"""OLMo 2: norms after attention and MLP instead of before, and on all heads' queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoints.architectures.base import Architecture
from paceline.checkpoints.hf_fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Mapping[str, Any]:
    bias = fields.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "qk_norm_whole": True,
        "norms_before": False,
        "norms_after": True,
    }


ARCHITECTURE = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    title="OLMo 2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    knobs=_knobs,
    renames={
        "post_attention_layernorm": "attention_output_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
)
