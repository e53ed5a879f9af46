"""Choice of the bits in which each matrix of a file is kept and computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Final

from paceline.backends.native.tensors import BLOCKS, KEPT, KINDS, OWN_BITS, PACKED, ROUTER, locate
from paceline.checkpoints.model.checkpoint import Checkpoint

__all__ = ["Kinds", "choose_kinds", "packed_bytes"]

# PacelineKind by the matrices that are one in memory and share a kind, as all experts do
_MATRICES: Final = (
    ("self_attn.q_proj",), ("self_attn.k_proj",), ("self_attn.v_proj",), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
_PLACES: Final = {
    KINDS[f"{name}.weight"]: place for place, names in enumerate(_MATRICES) for name in names
}
# q, k and v multiply the same rows, so they need them in one form
_TOGETHER: Final = slice(0, 3)
_EMBEDDING: Final = KINDS["model.embed_tokens.weight"]
_HEAD: Final = KINDS["lm_head.weight"]
_INT8: Final = "int8"
_NAMES: Final = {number: name for name, number in PACKED.items()}
# rows that lie together, and columns that share a scale in 4-bit weights
_PANEL: Final = 32
_GROUP: Final = 32
# columns of a block, and bytes of a panel's rows, for kinds that are blocks (csrc/kernels.h)
_GROUP_BYTES: Final = {
    "q4": (32, 640), "q4_0": (32, 576), "q4_k": (256, 4608), "q5_k": (256, 5632),
    "q6_k": (256, 6720), "iq4_nl": (32, 576), "iq4_xs": (256, 4352), "mxfp4": (32, 544),
}  # fmt: skip
# kinds with a float for each row
_SCALED: Final = ("int8", "q4", "q4_0")


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kind of each matrix of a file.

    Attributes:
        numbers: PacelineConfig.kinds, for ``NativeModel``; empty: all matrices have the model's
            dtype.
        note: how many matrices are kept in their own bits and how many are decoded, for users;
            empty where the dtype says all.
    """

    numbers: bytes = b""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Matrices that are one in memory, or experts of one layer, and share a kind."""

    # the file's type of each, and its columns
    matrices: list[tuple[str, int]] = field(default_factory=list)

    def own_kind(self, blocks: Mapping[str, str]) -> str | None:
        """Return the one of ``blocks``, by types, that holds all of them in their bits; None: there
        is none, or rows are not whole blocks."""
        types = {stored for stored, _ in self.matrices}
        kind = blocks.get(types.pop()) if len(types) == 1 else None
        broken = kind and any(columns % _GROUP_BYTES[kind][0] for _, columns in self.matrices)
        return None if broken else kind


def choose_kinds(checkpoint: Checkpoint, dtype: str) -> Kinds:
    """Keep a file's blocks in their bits, and decode the others to int8.

    ``gguf`` keeps all blocks that a kernel can read. ``q4`` keeps blocks of 4 bits in the layers,
    which cost no speed at any number of rows; a mixed file (Q4_K_M has matrices of Q6_K) spends
    more bits where rounding hurts most, and those become int8 instead of being rounded to 4.
    Matrices that are one in memory (gate and up), multiply the same rows (q, k and v), or belong to
    a layer's experts become int8 together if any of them must. Only k and v that a kernel can read
    stay in their bits next to a q of 4: that costs less than more bits for q, which has most of the
    rows. A table of embeddings that is not also the head is kept too. A file that is mainly of
    other types was given q4 by the user, and all of it is rounded.

    Args:
        dtype: a key of ``DTYPES``, or ``gguf``.
    """
    config = checkpoint.config
    if dtype == "int8":
        return Kinds(note=_decoded(checkpoint))
    if dtype != OWN_BITS and (dtype != "q4" or config.stored_dtype not in KEPT):
        return Kinds()
    blocks = {
        stored: kind for stored, kind in BLOCKS.items() if dtype == OWN_BITS or stored in KEPT
    }
    layers, tables = _groups(checkpoint)
    chosen = [pair for layer in layers for pair in zip(layer, _decide(layer, blocks), strict=True)]
    for place in (_HEAD, _EMBEDDING):
        # tied embedding and head are one matrix
        tied = config.tie_word_embeddings
        source, is_head = _EMBEDDING if tied else place, tied or place == _HEAD
        # rows of a table that is not the head are looked up, which takes as long in any bits
        may_keep = not is_head or dtype == OWN_BITS
        kind = tables.get(source, _Group()).own_kind(BLOCKS) if may_keep else None
        chosen.append((tables.get(place, _Group()), kind or _INT8))
    kept, decoded = Counter[str](), Counter[str]()
    for group, kind in chosen:
        (decoded if kind == _INT8 else kept).update(stored for stored, _ in group.matrices)
    note = f"{_counted(kept)} in their own bits"
    if decoded:
        note += f", {_counted(decoded)} as int8"
    if set(kept) & set(decoded):
        note += " (tables, what is multiplied together with other types, and rows of broken blocks)"
    return Kinds(bytes(PACKED[kind] for _, kind in chosen), note)


def _groups(checkpoint: Checkpoint) -> tuple[list[list[_Group]], dict[int, _Group]]:
    """Return the groups of each layer, in the order of _MATRICES, and the tables by their kinds."""
    layers = [[_Group() for _ in _MATRICES] for _ in range(checkpoint.config.num_hidden_layers)]
    tables: dict[int, _Group] = {}
    for name in checkpoint.tensor_names():
        shape = checkpoint.tensor_shape(name)
        if len(shape) != 2:
            continue
        kind, layer, _ = locate(name)
        if kind == ROUTER:
            continue
        place = _PLACES.get(kind)
        group = tables.setdefault(kind, _Group()) if place is None else layers[layer][place]
        group.matrices.append((checkpoint.tensor_type(name), shape[1]))
    return layers, tables


def _decide(layer: Sequence[_Group], blocks: Mapping[str, str]) -> list[str]:
    """Return the kind of each group: of ``blocks`` if one holds it, else int8. What is multiplied
    with q takes any kind of its own next to a q that has one, or all three become int8."""
    kinds = [group.own_kind(blocks) or _INT8 for group in layer]
    if _INT8 in kinds[_TOGETHER]:
        own = [group.own_kind(BLOCKS) or _INT8 for group in layer[_TOGETHER]]
        taken = kinds[0] != _INT8 and _INT8 not in own
        kinds[_TOGETHER] = own if taken else [_INT8] * len(own)
    return kinds


def _decoded(checkpoint: Checkpoint) -> str:
    """Return a note on matrices of few bits that are decoded to int8; "" without any."""
    types = Counter(
        checkpoint.tensor_type(name)
        for name in checkpoint.tensor_names()
        if len(checkpoint.tensor_shape(name)) == 2 and locate(name).kind != ROUTER
    )
    plain = ("Q8_0", "F16", "BF16", "F32", "F64")
    few = Counter({stored: count for stored, count in types.items() if stored not in plain})
    return f"{_counted(few)} decoded to int8" if few else ""


def packed_bytes(checkpoint: Checkpoint, dtype: str, *, has_head: bool = True) -> int:
    """Return the bytes of the matrices as the library packs them (``NativeModel.weight_bytes``),
    without loading any: in panels of 32 rows, with a float per row of int8, q4 and q4_0
    (csrc/matrix.cpp).

    Args:
        has_head: False: hidden states are wanted, and no head is packed.
    """
    config = checkpoint.config
    numbers = choose_kinds(checkpoint, dtype).numbers
    count = config.num_hidden_layers * len(_MATRICES)
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def packed(rows: int, columns: int, kind: int | None, table: bool = False) -> int:
        if kind is not None:
            name = _NAMES[kind]
        else:
            name = _INT8 if dtype == "q4" and (table or columns % _GROUP) else dtype
        rows = _padded(rows, _PANEL)
        own = 4 * rows * (name in _SCALED)
        if name in _GROUP_BYTES:
            columns_of, size = _GROUP_BYTES[name]
            return own + rows // _PANEL * (columns // columns_of) * size
        width = {"float32": 4, "bfloat16": 2, "int8": 1}[name]
        return own + rows * _padded(columns * width, 4)

    head, embedding = numbers[count:] or (None, None)
    total = packed(config.vocab_size, hidden, head, True) if has_head else 0
    if not (has_head and config.tie_word_embeddings):
        total += packed(config.vocab_size, hidden, embedding, True)
    for layer in range(config.num_hidden_layers):
        of_layer = numbers[layer * len(_MATRICES) :][: len(_MATRICES)] or [None] * len(_MATRICES)
        # matrices of one kind are one matrix
        for kind, part in groupby(
            zip(of_layer[:3], (heads, keys, keys), strict=True), key=itemgetter(0)
        ):
            total += packed(sum(rows for _, rows in part), hidden, kind)
        output, gate_up, down = of_layer[3:]
        total += packed(hidden, heads, output)
        copies, inner = 1, config.intermediate_size
        if config.num_experts and layer not in config.dense_layers:
            copies, inner = config.num_experts, config.expert_intermediate_size
            total += packed(copies, hidden, PACKED["float32"])
        # gate and up are interleaved in one matrix
        total += copies * packed(2 * _padded(inner, _PANEL // 2), hidden, gate_up)
        total += copies * packed(hidden, inner, down)
    return total


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _counted(types: Counter[str]) -> str:
    return ", ".join(f"{n} {stored}" for stored, n in sorted(types.items())) or "none"
