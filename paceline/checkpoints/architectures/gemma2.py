"""Gemma 2: norms around both halves of a layer, soft caps, and a window in every other layer."""

from __future__ import annotations

import math
from typing import Any, Final

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE", "GGUF_NAMES", "RENAMES", "gemma_gguf_knobs", "gemma_knobs"]

GGUF_NAMES: Final = {
    "post_attention_norm": "attention_output_norm",
    "post_ffw_norm": "mlp_output_norm",
}
RENAMES: Final = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def gemma_knobs(fields: Fields) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 have in common."""
    bias = fields.flag("attention_bias")
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


def _knobs(fields: Fields) -> Knobs:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in fields.layers]
    return {**gemma_knobs(fields), **fields.sliding(kinds)}


def gemma_gguf_knobs(fields: GGUFFields, large: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 have in common; ``large`` is the 27B's number of layers.

    Files hold norms' weights with the 1 added. They lack the factor on scores: it is head_dim **
    -0.5 in all published models but the 27B, which use the width divided by the number of heads
    instead of head_dim.
    """
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    return {
        "norms_after": True,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": (hidden // heads) ** -0.5 if fields.layers == large else None,
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    return {
        **gemma_gguf_knobs(fields, 46),
        "attention_softcap": fields.value("attn_logit_softcapping", 50.0) or None,
        "logits_softcap": fields.value("final_logit_softcapping", 30.0) or None,
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_layers": tuple(range(0, fields.layers, 2)),
    }


ARCHITECTURE = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    title="Gemma 2",
    gguf="gemma2",
    gguf_names=GGUF_NAMES,
    gguf_reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    gguf_knobs=_gguf_knobs,
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
