"""Tensors of a checkpoint for the library: stored blocks that it can read, float32 elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import CheckpointError

__all__ = [
    "BLOCKS",
    "KEPT",
    "KINDS",
    "OWN_BITS",
    "PACKED",
    "ROUTER",
    "TYPES",
    "Place",
    "RawTensor",
    "Tensor",
    "checkpoint_tensors",
    "locate",
]

# GGUF's names and numbers of the types that the library reads
TYPES: Final = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
}  # fmt: skip

# kinds of packed matrices by the library's numbers (csrc/kernels.h). The first four hold any type,
# the others their own blocks alone
PACKED: Final = {
    "float32": 0, "bfloat16": 1, "int8": 2, "q4": 3, "q4_0": 4, "q4_k": 5, "q5_k": 6, "q6_k": 7,
    "iq4_nl": 8, "iq4_xs": 9, "mxfp4": 10,
}  # fmt: skip
# kinds that hold a type's blocks in their own bits, so that no weight is rounded again
BLOCKS: Final = {
    "Q4_0": "q4_0", "Q4_1": "q4", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "MXFP4": "mxfp4",
}  # fmt: skip
# the dtype that keeps every matrix in its own bits
OWN_BITS: Final = "gguf"
# file types that "q4" keeps as they are
KEPT: Final = frozenset({"Q4_0", "Q4_1", "Q4_K"})

# PacelineTensor by the part of the name behind the layer
KINDS: Final = {
    "model.embed_tokens.weight": 0,
    "model.norm.weight": 1,
    "lm_head.weight": 2,
    "input_layernorm.weight": 3,
    "post_attention_layernorm.weight": 4,
    "self_attn.q_norm.weight": 5,
    "self_attn.k_norm.weight": 6,
    "self_attn.q_proj.weight": 7,
    "self_attn.k_proj.weight": 8,
    "self_attn.v_proj.weight": 9,
    "self_attn.o_proj.weight": 10,
    "mlp.gate_proj.weight": 11,
    "mlp.up_proj.weight": 12,
    "mlp.down_proj.weight": 13,
    "self_attn.q_proj.bias": 14,
    "self_attn.k_proj.bias": 15,
    "self_attn.v_proj.bias": 16,
    "self_attn.o_proj.bias": 17,
    "mlp.gate_proj.bias": 18,
    "mlp.up_proj.bias": 19,
    "mlp.down_proj.bias": 20,
    "attention_output_norm.weight": 21,
    "mlp_output_norm.weight": 22,
    "mlp.router.weight": 23,
    "mlp.router.bias": 24,
    "self_attn.sinks.weight": 25,
}

# always in float32: rounded, the router would choose other experts
ROUTER: Final = KINDS["mlp.router.weight"]

_TABLES: Final = ("model.embed_tokens.weight", "lm_head.weight")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """Stored rows of one of ``TYPES``: ``data`` uint8 [rows, bytes per row], C-contiguous."""

    data: NDArray[np.uint8]
    type: str
    columns: int


Tensor = NDArray[np.float32] | RawTensor


class Place(NamedTuple):
    """Destination of a tensor: a PacelineTensor, its layer and its expert, 0 where it has none."""

    kind: int
    layer: int
    expert: int


def locate(name: str) -> Place:
    """Return the place of a tensor by our name of it. Raises CheckpointError for unknown names."""
    match = _LAYER.fullmatch(name)
    part = match[2] if match else name
    expert = _EXPERT.match(part)
    kind = KINDS.get(_EXPERT.sub("mlp.", part))
    if kind is None:
        raise CheckpointError(f"tensor {name} is not part of a model the native path knows")
    return Place(kind, int(match[1]) if match else 0, int(expert[1]) if expert else 0)


def checkpoint_tensors(
    checkpoint: Checkpoint, *, has_head: bool = True, in_bits: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint, read when it is asked for and dropped with the next. The
    largest, tables and heads, come first: later, their pages would add to all that was packed.

    Args:
        has_head: False: the output head is not read.
        in_bits: weights may be kept in 4 bits; else nothing is rounded to fit into such blocks.

    Norms are given as the kernels multiply by them: with what the model adds to the weight, and the
    last one with the factor on logits.
    """
    config = checkpoint.config
    names = checkpoint.tensor_names()
    for name in (*filter(_TABLES.__contains__, names), *(n for n in names if n not in _TABLES)):
        if name == "lm_head.weight" and not has_head:
            continue
        tensor = _read(checkpoint, name, in_bits)
        if name.endswith("norm.weight") and not isinstance(tensor, RawTensor):
            tensor = tensor + np.float32(config.norm_offset)
            if name == "model.norm.weight":
                tensor = tensor / np.float32(config.logits_divisor)
        yield name, tensor
        # else the pages of the whole file would stay in memory next to the packed weights
        checkpoint.release()


def _read(checkpoint: Checkpoint, name: str, in_bits: bool) -> Tensor:
    shape, stored = checkpoint.tensor_shape(name), checkpoint.tensor_type(name)
    quantised = isinstance(checkpoint, HFCheckpoint) and checkpoint.is_quantised(name)
    # matrices put together from others have stored rows only if those are blocks
    as_stored = stored in TYPES and (not quantised or (in_bits and stored in BLOCKS))
    if len(shape) == 2 and as_stored:
        data, type_name = checkpoint.raw_tensor(name)
        return RawTensor(np.ascontiguousarray(data), type_name, shape[1])
    return checkpoint.tensor(name)
