"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    return {
        "num_experts": fields.whole("num_local_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_intermediate_size": fields.whole("intermediate_size"),
        "normalise_experts": True,
        **fields.sliding(["sliding_attention"] * len(fields.layers)),
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    return {
        "num_experts": fields.count("expert_count"),
        "experts_per_token": fields.count("expert_used_count"),
        "expert_intermediate_size": fields.count("feed_forward_length"),
        "normalise_experts": True,
    }


ARCHITECTURE = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    title="Mixtral",
    gguf="llama",
    gguf_experts=True,
    gguf_interleaved=True,
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    reads=frozenset({"num_local_experts"}),
    knobs=_knobs,
    renames={
        "block_sparse_moe.gate": "mlp.router",
        "block_sparse_moe.experts.*.w1": "mlp.experts.*.gate_proj",
        "block_sparse_moe.experts.*.w2": "mlp.experts.*.down_proj",
        "block_sparse_moe.experts.*.w3": "mlp.experts.*.up_proj",
    },
)
