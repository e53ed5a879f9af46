"""gpt-oss: experts with biases in every layer, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.config import RopeConfig
from paceline.checkpoints.model.fields import Fields
from paceline.checkpoints.weights.stacked_experts import unstacked
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE"]

_ALPHA = 1.702
_LIMIT = 7.0
_EXPERTS: Mapping[str, Any] = {
    "normalise_experts": True,
    "router_bias": True,
    "mlp_bias": True,
    "activation": "clamped_swiglu",
    "attention_sinks": True,
}


def _knobs(fields: Fields) -> Knobs:
    alpha = fields.number(fields.raw, "swiglu_alpha", _ALPHA)
    if alpha != _ALPHA:
        raise CheckpointError(f"swiglu_alpha={alpha} is not supported, only {_ALPHA}")
    bias = fields.flag("attention_bias")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in fields.layers]
    return {
        **_EXPERTS,
        "swiglu_limit": fields.number(fields.raw, "swiglu_limit", _LIMIT),
        "qkv_bias": bias,
        "o_bias": bias,
        "num_experts": fields.whole("num_local_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_intermediate_size": fields.whole("intermediate_size"),
        **fields.sliding(kinds),
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    # files omit that the ramp of yarn is not rounded, and which layers have the window
    context = fields.count("context_length")
    return {
        **_EXPERTS,
        "num_experts": fields.count("expert_count"),
        "experts_per_token": fields.count("expert_used_count"),
        "expert_intermediate_size": fields.count("expert_feed_forward_length"),
        "sliding_layers": tuple(range(0, fields.layers, 2)),
        "rope": RopeConfig(
            theta=fields.value("rope.freq_base", 150000.0),
            kind="yarn",
            factor=fields.value("rope.scaling.factor"),
            original_max_position=fields.count("rope.scaling.original_context_length", context),
            beta_fast=fields.value("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.value("rope.scaling.yarn_beta_slow", 1.0),
            truncate=False,
        ),
    }


ARCHITECTURE = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    title="gpt-oss",
    gguf="gpt-oss",
    gguf_experts=True,
    gguf_names={
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    reads=frozenset({"num_local_experts"}),
    knobs=_knobs,
    renames={"self_attn.sinks": "self_attn.sinks.weight"},
    unstacked=unstacked,
)
