"""OLMo 2: norms after attention and MLP instead of before, and on all heads' queries and keys."""

from __future__ import annotations

from typing import Final

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE"]

_KNOBS: Final = {
    "qk_norm": True,
    "qk_norm_whole": True,
    "norms_before": False,
    "norms_after": True,
}


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, **_KNOBS}


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    if fields.count("attention.sliding_window", 0):
        raise CheckpointError("OLMo 3, which has a sliding window, is not supported")
    return _KNOBS


ARCHITECTURE = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    title="OLMo 2",
    gguf="olmo2",
    gguf_names={
        "post_attention_norm": "attention_output_norm",
        "post_ffw_norm": "mlp_output_norm",
    },
    gguf_knobs=_gguf_knobs,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    knobs=_knobs,
    renames={
        "post_attention_layernorm": "attention_output_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
)
