"""Architectures by name, to plan for a model without having it here.

Each row is what the publisher's ``config.json`` says; parameter counts follow from the shapes, so
they cannot disagree with them.
"""

from __future__ import annotations

import math
from pathlib import Path

from paceline.checkpoints.base import expected_shapes, open_checkpoint
from paceline.checkpoints.config import ModelConfig, RopeConfig
from paceline.core.errors import ConfigError

__all__ = ["MODELS", "find_model", "kv_bytes_per_token", "num_parameters"]


def _card(
    model_type: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=tied,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        stored_dtype="bfloat16",
    )


# vocabulary, hidden, intermediate, layers, heads, key-value heads, context
MODELS: dict[str, ModelConfig] = {
    "smollm2-135m": _card("llama", 49152, 576, 1536, 30, 9, 3, 8192, head_dim=64, tied=True),
    "llama-2-7b": _card("llama", 32000, 4096, 11008, 32, 32, 32, 4096),
    "llama-2-13b": _card("llama", 32000, 5120, 13824, 40, 40, 40, 4096),
    "llama-2-70b": _card("llama", 32000, 8192, 28672, 80, 64, 8, 4096),
    "llama-3.1-8b": _card("llama", 128256, 4096, 14336, 32, 32, 8, 131072),
    "llama-3.1-70b": _card("llama", 128256, 8192, 28672, 80, 64, 8, 131072),
    "mistral-7b": _card("mistral", 32768, 4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-7b": _card("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768),
    "qwen3-8b": _card("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960),
    "qwen3-32b": _card("qwen3", 151936, 5120, 25600, 64, 64, 8, 40960),
}


def find_model(name: str) -> ModelConfig:
    """A card by name, or the config of a checkpoint folder or file.

    Raises:
        ConfigError: neither; the message lists the cards.
        CheckpointError: a checkpoint that cannot be read.
    """
    card = MODELS.get(name.lower())
    if card is not None:
        return card
    path = Path(name)
    if path.exists():
        return open_checkpoint(path).config
    raise ConfigError(
        f"{name!r} is neither a checkpoint nor a known model; known are {', '.join(sorted(MODELS))}"
    )


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: float = 2.0) -> float:
    """Keys and values of one token in all layers, over all devices together.

    Layers with a sliding window count like the others: they hold fewer tokens, not fewer bytes of
    a token.
    """
    width = config.num_key_value_heads * config.head_dim
    return 2.0 * config.num_hidden_layers * width * bytes_per_value
