"""The interface of every checkpoint, whatever its file format, and the tensors of a model.

Tensors have the names of Hugging Face's Llama in every format, so compute paths know one layout.
In it, dimension ``i`` of a head is rotated against dimension ``i + head_dim / 2``; ``row_order``
gives the rows that order. ::

    model.embed_tokens.weight                  [vocab, hidden]
    model.layers.N.input_layernorm.weight      [hidden], norms before
    model.layers.N.self_attn.{q,k,v,o}_proj    .weight, .bias if the config says so
    model.layers.N.self_attn.{q,k}_norm.weight [head_dim], or of all heads together, if present
    model.layers.N.self_attn.sinks.weight      [heads], if present
    model.layers.N.attention_output_norm.weight [hidden], norms after
    model.layers.N.post_attention_layernorm.weight [hidden], before the MLP: norms before
    model.layers.N.mlp.{gate,up,down}_proj     .weight, .bias if the config says so
    model.layers.N.mlp.router                  .weight [experts, hidden], .bias if the config says
                                               so: in layers with experts, and for each expert
    model.layers.N.mlp.experts.E.{gate,up,down}_proj  as above
    model.layers.N.mlp_output_norm.weight      [hidden], norms after
    model.norm.weight                          [hidden]
    lm_head.weight                             [vocab, hidden], absent when tied

This module does not know the layout of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError

__all__ = ["Checkpoint", "check_shapes", "expected_shapes", "row_order"]


class Checkpoint(Protocol):
    """An opened model file or folder, checked: the config is sane and every tensor of the model
    exists with the shape that the config implies. Opening raises CheckpointError otherwise.

    Safe to use from one thread at a time; the file must not change while it is open.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the model's tensors; ``lm_head.weight`` is missing when tied."""

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, rows first. Raises CheckpointError for an unknown name."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the values in float32, dequantised: a fresh array that the caller may change.

        Raises CheckpointError for an unknown name or a stored type that cannot be converted.
        """

    def raw_tensor(self, name: str) -> tuple[NDArray[np.uint8], str]:
        """Return a matrix as it is stored, [rows, bytes per row], and GGUF's name of its type, such
        as "Q4_1" or "BF16". Rows are in Hugging Face order.

        Raises CheckpointError for an unknown name or a tensor that is not a matrix.
        """

    def tensor_type(self, name: str) -> str:
        """Return GGUF's name of the type that a tensor is stored in. Raises CheckpointError for an
        unknown name."""

    def release(self) -> None:
        """Free memory that holds parts of the file. Raw tensors stay readable: the system reads
        them again."""


_ROTATED: Final = re.compile(r"\.self_attn\.(q_proj|k_proj|q_norm|k_norm)\.")
# tensors that some converters write in addition, which follow from the config
_IGNORED: Final = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|^rope_")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a model of this config has, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, hidden, config.mlp_bias)
        linear(f"{name}.up_proj", width, hidden, config.mlp_bias)
        linear(f"{name}.down_proj", hidden, width, config.mlp_bias)

    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        if config.norms_before:
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", queries, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", keys, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", keys, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, queries, config.o_bias)
        if config.qk_norm:
            whole = config.qk_norm_whole
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (queries if whole else config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (keys if whole else config.head_dim,)
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.sinks.weight"] = (config.num_attention_heads,)
        if config.norms_after:
            shapes[f"{prefix}.attention_output_norm.weight"] = (hidden,)
            shapes[f"{prefix}.mlp_output_norm.weight"] = (hidden,)
        if config.norms_before:
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.num_experts and layer not in config.dense_layers:
            linear(f"{prefix}.mlp.router", config.num_experts, hidden, config.router_bias)
            for expert in range(config.num_experts):
                mlp(f"{prefix}.mlp.experts.{expert}", config.expert_intermediate_size)
        else:
            mlp(f"{prefix}.mlp", inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def row_order(config: ModelConfig, name: str) -> NDArray[np.int64] | None:
    """Return the stored row of each row of a tensor, where only part of a head is rotated.

    Files then pair dimension ``i`` with ``i + rotary_dim / 2``. Queries and keys are reordered
    alike, so that their products stay the same and the pairs lie as in a full rotation::

        stored rows of a head:   a0 .. a(r-1) b0 .. b(r-1) rest               r = rotary_dim / 2
        returned rows:           a0 .. a(r-1) half of rest b0 .. b(r-1) other half

    None: rows are as they are stored.
    """
    match = _ROTATED.search(name)
    if config.rotary_dim is None or match is None:
        return None
    dim, pairs, half = config.head_dim, config.rotary_dim // 2, config.head_dim // 2
    rest = np.arange(2 * pairs, dim)
    middle = half - pairs
    one = np.concatenate(
        (np.arange(pairs), rest[:middle], np.arange(pairs, 2 * pairs), rest[middle:])
    )
    if match[1] == "q_norm" or match[1] == "k_norm":
        return one
    heads = config.num_attention_heads if match[1] == "q_proj" else config.num_key_value_heads
    order: NDArray[np.int64] = (np.arange(heads)[:, None] * dim + one).reshape(-1)
    return order


def check_shapes(
    path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Compare the tensors in a file (``shapes``) with those that its config implies.

    Returns the names of the model's tensors. Other tensors are tolerated only where converters are
    known to write them: an unknown one means that the config describes another model, whose answers
    would be nonsense.

    Raises:
        CheckpointError: tensors missing, of another shape, or left over.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the {len(expected)} tensors that its config implies are "
            f"missing, e.g. {', '.join(missing[:3])}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(shapes[name])}, "
                f"its config implies {list(shape)}"
            )
    # files of tied models may store the head too
    extra = [
        name
        for name in shapes
        if name not in expected and name != "lm_head.weight" and not _IGNORED.search(name)
    ]
    if extra:
        raise CheckpointError(
            f"{path}: {len(extra)} tensors that a {config.model_type} model with "
            f"{config.num_hidden_layers} layers does not have, e.g. {', '.join(extra[:3])}"
        )
    return tuple(expected)
