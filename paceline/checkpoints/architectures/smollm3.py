"""SmolLM3: Llama with some layers that are not rotated."""

from __future__ import annotations

from paceline.checkpoints.architectures.base import Architecture, GGUFFields, Knobs
from paceline.checkpoints.model.fields import Fields
from paceline.errors import CheckpointError

__all__ = ["ARCHITECTURE"]


def _knobs(fields: Fields) -> Knobs:
    bias = fields.flag("attention_bias")
    interval = fields.whole("no_rope_layer_interval")
    rotated = fields.raw.get("no_rope_layers")
    if rotated is None:
        if interval < 1:
            raise CheckpointError(f"no_rope_layer_interval is {interval}, must be at least 1")
        rotated = [int((layer + 1) % interval != 0) for layer in fields.layers]
    # despite the field's name, 1 means that a layer is rotated
    if not isinstance(rotated, list) or any(value not in (0, 1) for value in rotated):
        raise CheckpointError(f"no_rope_layers is {rotated!r:.80}, must be a list of 0 and 1")
    if len(rotated) < len(fields.layers):
        raise CheckpointError(f"no_rope_layers has {len(rotated)} entries, fewer than layers")
    window = fields.flag("use_sliding_window")
    kinds = ["full_attention" if on or not window else "sliding_attention" for on in rotated]
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": fields.flag("mlp_bias"),
        "unrotated_layers": tuple(layer for layer in fields.layers if not rotated[layer]),
        **fields.sliding(kinds[: len(fields.layers)]),
    }


def _gguf_knobs(fields: GGUFFields) -> Knobs:
    # the file does not name them; every published model has every fourth, as llama.cpp assumes
    return {"unrotated_layers": tuple(range(3, fields.layers, 4))}


ARCHITECTURE = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    title="SmolLM3",
    gguf="smollm3",
    gguf_interleaved=True,
    gguf_knobs=_gguf_knobs,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    reads=frozenset({"no_rope_layers"}),
    knobs=_knobs,
)
