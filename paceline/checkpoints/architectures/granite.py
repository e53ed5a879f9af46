"""Granite 3, dense: Llama with four multipliers."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": fields.flag("mlp_bias"),
        "embedding_scale": fields.number(fields.raw, "embedding_multiplier", 1.0),
        "residual_scale": fields.number(fields.raw, "residual_multiplier", 1.0),
        "attention_scale": fields.number(fields.raw, "attention_multiplier", 1.0),
        "logits_divisor": fields.number(fields.raw, "logits_scaling", 1.0),
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    # llama.cpp writes 0 for no factor
    return {
        "embedding_scale": fields.value("embedding_scale", 0.0) or 1.0,
        "residual_scale": fields.value("residual_scale", 0.0) or 1.0,
        "attention_scale": fields.value("attention.scale", 0.0) or None,
        "logits_divisor": fields.value("logit_scale", 0.0) or 1.0,
    }


ARCHITECTURE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    title="Granite 3, dense",
    gguf="granite",
    gguf_interleaved=True,
    gguf_reads=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    gguf_knobs=_gguf_knobs,
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    reads=frozenset(
        {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
    ),
    knobs=_knobs,
)
