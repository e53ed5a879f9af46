"""Llama 1 to 3.x, SmolLM and SmolLM2."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


ARCHITECTURE = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    title="Llama 1 to 3.x, SmolLM, SmolLM2",
    gguf="llama",
    gguf_interleaved=True,
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    knobs=_knobs,
)
