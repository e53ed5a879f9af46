"""Gemma 3, text alone: Gemma 2 with norms on queries and keys and a rotary embedding of its own in
layers with a window."""

from __future__ import annotations

from typing import Any

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.architectures.gemma2 import (
    GGUF_NAMES,
    RENAMES,
    gemma_gguf_knobs,
    gemma_knobs,
)
from paceline.checkpoints.model.config import RopeConfig
from paceline.checkpoints.model.fields import Fields
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE"]

_GLOBAL_THETA = 1000000.0
_LOCAL_THETA = 10000.0


def _knobs(fields: Fields) -> Knobs:
    pattern = fields.whole("sliding_window_pattern")
    if pattern < 1:
        raise CheckpointError(f"sliding_window_pattern is {pattern}, must be at least 1")
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in fields.layers]
    rope, local = _rope_parameters(fields)
    sliding = fields.sliding(kinds)
    bidirectional = fields.flag("use_bidirectional_attention")
    if bidirectional and sliding:
        # the file counts the tokens on both sides; ours counts one side, the token itself included
        sliding["sliding_window"] = sliding["sliding_window"] // 2 + 1
    return {
        **gemma_knobs(fields),
        **sliding,
        "bidirectional": bidirectional,
        "qk_norm": True,
        "rope": fields.rope({"rope_theta": _GLOBAL_THETA} | rope),
        "sliding_rope": fields.rope({"rope_theta": _LOCAL_THETA} | local),
    }


def _rope_parameters(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of full and of sliding layers, in transformers 5's spelling or the older one."""
    found = fields.rope_parameters()
    kinds = ("full_attention", "sliding_attention")
    if any(kind in found for kind in kinds):
        rope, local = (found.get(kind) or {} for kind in kinds)
        if not isinstance(rope, dict) or not isinstance(local, dict) or set(found) - set(kinds):
            raise CheckpointError(f"rope_parameters is {found!r:.80}, not an object for each kind")
        return rope, local
    theta = fields.number(fields.raw, "rope_theta", _GLOBAL_THETA)
    local_theta = fields.number(fields.raw, "rope_local_base_freq", _LOCAL_THETA)
    return {"rope_theta": theta, **found}, {"rope_theta": local_theta}


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    local = fields.value("rope.freq_base_swa", _LOCAL_THETA)
    return {
        **gemma_gguf_knobs(fields, 62),
        "qk_norm": True,
        "logits_softcap": fields.value("final_logit_softcapping", 0.0) or None,
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_layers": tuple(i for i in range(fields.layers) if (i + 1) % 6),
        "sliding_rope": RopeConfig(theta=local),
    }


ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    title="Gemma 3, text alone",
    gguf="gemma3",
    gguf_names=GGUF_NAMES,
    gguf_reads=frozenset({"final_logit_softcapping"}),
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    reads=frozenset(
        {
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "rope_local_base_freq",
            "use_bidirectional_attention",
        }
    ),
    knobs=_knobs,
    activation_field="hidden_activation",
    activations=("gelu_pytorch_tanh",),
    renames=RENAMES,
)
