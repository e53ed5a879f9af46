"""Mistral 7B and its successors with text alone."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, Knobs
from paceline.checkpoints.model.fields import Fields

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    if fields.raw.get("sliding_window") is None:
        return {}
    layers = tuple(fields.layers)
    return {"sliding_window": fields.whole("sliding_window"), "sliding_layers": layers}


ARCHITECTURE = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    title="Mistral, text alone",
    gguf="llama",
    gguf_interleaved=True,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    knobs=_knobs,
)
