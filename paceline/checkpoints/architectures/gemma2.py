"""Gemma 2: norms around both halves of a layer, soft caps, and a window in every other layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from paceline.checkpoints.architectures.base import Architecture
from paceline.checkpoints.hf_fields import Fields
from paceline.core.errors import CheckpointError

__all__ = ["ARCHITECTURE", "RENAMES", "gemma_knobs"]

RENAMES: Final = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def gemma_knobs(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    bias = fields.flag("attention_bias")
    if fields.raw.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported")
    hidden, scalar = fields.whole("hidden_size"), fields.number(fields.raw, "query_pre_attn_scalar")
    if hidden < 1 or scalar <= 0:
        raise CheckpointError(
            f"hidden_size={hidden} and query_pre_attn_scalar={scalar}: not above 0"
        )
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "norms_after": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": scalar**-0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logits_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _knobs(fields: Fields) -> Mapping[str, Any]:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in fields.layers]
    return {**gemma_knobs(fields), **fields.sliding(kinds)}


ARCHITECTURE = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    title="Gemma 2",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    reads=frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}),
    knobs=_knobs,
    activation_field="hidden_activation",
    activations=("gelu_pytorch_tanh",),
    renames=RENAMES,
)
