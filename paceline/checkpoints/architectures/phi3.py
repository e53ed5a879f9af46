"""Phi-3, Phi-3.5 and Phi-4, dense and without vision: fused matrices, and in Phi-4-mini a rotation
of the first dimensions of a head alone."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    return fields.sliding(["sliding_attention"] * len(fields.layers))


ARCHITECTURE = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    title="Phi-3, Phi-3.5, Phi-4, dense, text alone",
    gguf="phi3",
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    knobs=_knobs,
    partial_rotary=True,
    # transformers reads the first files' names this way
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
