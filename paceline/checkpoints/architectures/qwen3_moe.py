"""Qwen3 with a mixture of experts in all layers or some."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    step, dense = fields.whole("decoder_sparse_step"), fields.raw.get("mlp_only_layers", [])
    if step < 1:
        raise CheckpointError(f"decoder_sparse_step is {step}, must be at least 1")
    if not isinstance(dense, list):
        raise CheckpointError(f"mlp_only_layers is {dense!r:.80}, must be a list of layers")
    # transformers writes the first name and reads both
    experts = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    window = ["sliding_attention"] * len(fields.layers)
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "num_experts": fields.whole(experts, 128),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "expert_intermediate_size": fields.whole("moe_intermediate_size"),
        "normalise_experts": fields.flag("norm_topk_prob"),
        "dense_layers": tuple(i for i in fields.layers if i in dense or (i + 1) % step),
        **(fields.sliding(window) if fields.flag("use_sliding_window") else {}),
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    # as in llama.cpp: files hold models with experts in every layer, and weights that sum to 1
    return {
        "qk_norm": True,
        "num_experts": fields.count("expert_count"),
        "experts_per_token": fields.count("expert_used_count"),
        "expert_intermediate_size": fields.count("expert_feed_forward_length"),
        "normalise_experts": True,
    }


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    title="Qwen3, mixture of experts",
    gguf="qwen3moe",
    gguf_experts=True,
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    reads=frozenset({"num_experts", "num_local_experts"}),
    knobs=_knobs,
    renames={"mlp.gate": "mlp.router"},
)
