"""Which matrices of a file are computed in the file's bits, and which as bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from paceline.backends.native.tensors import KEPT, KINDS, locate
from paceline.checkpoints.base import Checkpoint

__all__ = ["Kinds", "choose_kinds", "packed_bytes"]

_GROUP: Final = 32
# rows that lie together
_PANEL: Final = 32
# PacelineConfig.wide by what is packed into one matrix
_BITS: Final = {
    KINDS[f"{name}.weight"]: bit
    for bit, names in (
        (1, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (2, ("self_attn.o_proj",)),
        (4, ("mlp.gate_proj", "mlp.up_proj")),
        (8, ("mlp.down_proj",)),
    )
    for name in names
}


@dataclass(frozen=True, slots=True)
class Kinds:
    """What becomes of each matrix of a file.

    Attributes:
        wide: as ``NativeModel`` takes it, a byte for each layer; empty: nothing is wider than
            the model's dtype.
        note: how many matrices are kept in which bits and how many are decoded, for people; empty
            where the dtype says all.
    """

    wide: bytes = b""
    note: str = ""


def choose_kinds(checkpoint: Checkpoint, dtype: str) -> Kinds:
    """Keep 4-bit blocks as they are and decode everything else in such a file to int8.

    A mixed file (Q4_K_M has matrices of Q6_K) spends more bits where rounding hurts most, so these
    are not rounded to 4. Matrices that are multiplied as one (q, k and v; gate and up) become int8
    together if any of them must. In a file that is mainly of other types q4 was asked for by
    somebody, and rounds all of it.
    """
    config = checkpoint.config
    if dtype != "q4" or config.stored_dtype not in KEPT:
        return Kinds()
    parts: list[tuple[int, int, str]] = []
    tables: Counter[str] = Counter()
    wide = bytearray(config.num_hidden_layers)
    for name in checkpoint.tensor_names():
        shape = checkpoint.tensor_shape(name)
        if len(shape) != 2:
            continue
        kind, layer = locate(name)
        stored, bit = checkpoint.tensor_type(name), _BITS.get(kind)
        if bit is None:
            tables[stored] += 1
            continue
        parts.append((layer, bit, stored))
        if stored not in KEPT or shape[1] % _GROUP:
            wide[layer] |= bit
    kept = Counter(stored for layer, bit, stored in parts if not wide[layer] & bit)
    decoded = Counter(stored for layer, bit, stored in parts if wide[layer] & bit) + tables
    note = f"{_counted(kept)} in their 4 bits, {_counted(decoded)} as int8"
    if any(stored in KEPT for stored in decoded):
        note += " (embeddings, the head, and what is multiplied together with other types)"
    return Kinds(bytes(wide), note)


def packed_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the matrices as the library packs them, ``NativeModel.weight_bytes``, without
    loading any: in panels of 32 rows, with a scale for each row of int8 (csrc/matrix.cpp)."""
    config = checkpoint.config
    wide = choose_kinds(checkpoint, dtype).wide or bytes(config.num_hidden_layers)

    def packed(rows: int, columns: int, kind: str) -> int:
        rows = _padded(rows, _PANEL)
        if kind == "q4":
            # a nibble for each value, and a scale and a minimum in halves for each group
            return rows * columns // _GROUP * (_GROUP // 2 + 4)
        width = {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
        return rows * (_padded(columns * width, 4) + 4 * (kind == "int8"))

    table = "int8" if dtype == "q4" else dtype
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    shapes = (
        (1, heads + 2 * keys, hidden),
        (2, hidden, heads),
        # gate and up lie in one another
        (4, 2 * _padded(inner, _PANEL // 2), hidden),
        (8, hidden, inner),
    )
    total = packed(config.vocab_size, hidden, table) * (1 if config.tie_word_embeddings else 2)
    for layer in wide:
        for bit, rows, columns in shapes:
            whole = dtype == "q4" and not layer & bit and columns % _GROUP == 0
            total += packed(rows, columns, "q4" if whole else table)
    return total


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _counted(types: Counter[str]) -> str:
    return ", ".join(f"{n} {stored}" for stored, n in sorted(types.items())) or "none"
