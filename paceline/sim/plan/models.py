"""The model to plan for: one on this machine, or a known one by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoints.gguf.shards import read_gguf_parts
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from paceline.sim.step_times.models import ModelShape, known_models

__all__ = ["find_model"]


def find_model(name: str, models: Sequence[ModelShape] = ()) -> ModelShape:
    """Return a known model (``step_times/models.json``), or the shape of a checkpoint folder or
    file. A GGUF file's weights take as many bytes as in the file.

    Args:
        models: shapes in which the name is looked up first.

    Raises:
        ConfigError: neither exists; the message lists the known ones.
        CheckpointError: a checkpoint that cannot be read.
    """
    path = Path(name)
    if not path.exists():
        try:
            return ModelShape.named(name, models)
        except ConfigError:
            known = ", ".join(shape.name.split("/")[-1].lower() for shape in known_models())
            raise ConfigError(
                f"{name!r} is neither a checkpoint nor a known model; known are {known}; "
                "--model-shape FILE gives others"
            ) from None
    config = open_checkpoint(path).config
    stored = 0
    if path.is_file():
        file, _ = read_gguf_parts(path)
        stored = sum(tensor.num_bytes for tensor in file.tensors.values())
    return ModelShape(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        expert_intermediate_size=config.expert_intermediate_size,
        tied=config.tie_word_embeddings,
        stored_bytes=stored,
        source=str(path),
    )
