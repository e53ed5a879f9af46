"""GGUF's kinds: read as the ``gguf`` package does, and each matrix of a mixed file in its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

from paceline.backends.native import (
    NativeModel,
    NativeSettings,
    RawTensor,
    checkpoint_tensors,
    choose_kinds,
    packed_bytes,
    unavailable_reason,
)
from paceline.backends.native.single_kernels import PackedMatrix
from paceline.backends.native.tensors import BLOCKS, PACKED
from paceline.backends.runner.interface import RowAdapter
from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint, open_gguf
from paceline.checkpoints.model.adapter import MODULES
from paceline.errors import ConfigError
from tests.backends.native.reference import levels
from tests.backends.native.test_adapters import make_adapter
from tests.checkpoints.adapters import Pairs, random_pairs
from tests.checkpoints.builders import llama_metadata

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

# places of the halves of a block
HALVES = {
    Q.Q4_0: (0,), Q.Q8_0: (0,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.IQ4_NL: (0,),
    Q.IQ4_XS: (0,), Q.MXFP4: (),
}  # fmt: skip
# kinds that are kept in the bits that the file has
KEPT = (Q.Q4_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4)
HIDDEN, INNER, VOCAB, LAYERS = 256, 512, 64, 2


def _blocks(kind: Q, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes are valid blocks, once their halves are numbers of a sensible size."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    if kind == Q.MXFP4:
        # a scale is a power of two, by its exponent and 127
        blocks[:, :, 0] = rng.integers(118, 121, blocks.shape[:2])
    for place in HALVES[kind]:
        # of Q4_K and Q5_K, so that values lie around zero: the minimum is about 8 or 16 scales
        factor = 2.0**-14 if kind == Q.Q6_K else 2.0**-6 if kind == Q.Q4_0 else 2.0**-11
        if place == 2:
            factor *= 7.5 if kind == Q.Q4_K else 15.5
        halves = rng.uniform(0.5, 1.0, blocks.shape[:2]) * factor
        blocks[:, :, place : place + 2] = halves.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _spoil(stored: NDArray[np.uint8], kind: Q, row: int) -> None:
    """Scales at the ends of what there is: a subnormal half and a negative one in the next row;
    of powers of two the least, which are subnormal, and the largest whose values are finite."""
    if kind == Q.MXFP4:
        stored[row, :51:17], stored[row + 1, ::17] = (0, 1, 2), 251
        return
    first, *_ = HALVES[kind]
    stored[row, first : first + 2] = np.array([3e-6], dtype="<f2").view(np.uint8)
    stored[row + 1, first : first + 2] = np.array([-0.01], dtype="<f2").view(np.uint8)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_are_read_as_gguf_reads_them(kind: Q) -> None:
    stored = _blocks(kind, 37, 768, 1)
    _spoil(stored, kind, 3)
    expected = gguf.quants.dequantize(stored, kind)
    matrix = PackedMatrix(RawTensor(stored, kind.name, 768), "float32")
    np.testing.assert_allclose(matrix.unpack(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_kept_blocks_lose_nothing(kind: Q) -> None:
    stored = _blocks(kind, 70, 768, 2)
    # in both halves of a panel
    for row in (3, 20):
        _spoil(stored, kind, row)
    unpacked = PackedMatrix(RawTensor(stored, kind.name, 768), BLOCKS[kind.name]).unpack()
    expected = gguf.quants.dequantize(stored, kind)
    if kind == Q.Q4_0:
        # but for what is below a sixteenth of a row's largest scale, which has whole steps of it
        step = 2.0 ** (np.floor(np.log2(2.0**-6)) - 1 - 14)
        small = np.s_[[3, 20], :32]
        assert 0 < np.abs(unpacked[small] - expected[small]).max() <= 8 * step / 2
        unpacked[small] = expected[small]
    np.testing.assert_array_equal(unpacked, expected)


def test_kept_blocks_are_of_their_own_type() -> None:
    with pytest.raises(ConfigError, match="blocks of their own type alone"):
        PackedMatrix(RawTensor(_blocks(Q.Q5_K, 32, 256, 1), "Q5_K", 256), "q6_k")
    with pytest.raises(ConfigError, match="whole blocks of 256 columns, got 288"):
        PackedMatrix(np.ones((32, 288), dtype=np.float32), "q4_k")


def test_q4_rounds_nothing_of_q4_k_but_scales() -> None:
    stored = _blocks(Q.Q4_K, 37, 768, 2)
    expected = gguf.quants.dequantize(stored, Q.Q4_K)
    packed = PackedMatrix(RawTensor(stored, "Q4_K", 768), "q4").unpack()
    # a value is a scale times at most 15, less a minimum; both are whole steps of 2^-14 of the
    # largest of the row at most
    grouped = expected.reshape(37, -1, 32)
    span = grouped.max(axis=2) - grouped.min(axis=2)
    most = (span + np.abs(grouped).max(axis=2)).max(axis=1, keepdims=True)
    error = np.abs(packed - expected).reshape(grouped.shape).max(axis=2)
    assert (error <= 4.5 * 2.0**-14 * most + 1e-7).all()
    assert error.max() > 0


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_products_are_those_of_the_values(kind: Q, isa: str) -> None:
    # of many rows as many as 16 blocks of Q4_K are taken together
    columns = 18 * 256 if kind == Q.Q4_K else 512
    stored = _blocks(kind, 70, columns, 3)
    weights = gguf.quants.dequantize(stored, kind).astype(np.float64)
    # whole numbers up to 127 in each group: nothing of them is lost in 8 bits
    x = np.random.default_rng(4).integers(-127, 128, (215, columns)).astype(np.float32)
    x[:, ::32] = 127
    # values at the ends of their range, whose sums are the largest that there are
    x[7] = 127
    x[8] = -127
    matrix = PackedMatrix(RawTensor(stored, kind.name, columns), BLOCKS[kind.name], isa=isa)
    whole = matrix.multiply(x)
    size = np.abs(x) @ np.abs(weights).T
    # what is left is the rounding of sums in float32
    assert (np.abs(whole - x @ weights.T) <= 2.0**-22 * size).all()
    for rows in (1, 2, 3, 5, 6, 7, 13, 209):
        # a row's bits do not depend on who else is multiplied
        np.testing.assert_array_equal(matrix.multiply(x[:rows]), whole[:rows])


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("bits", [0, 255])
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_the_largest_sums_there_are(kind: Q, bits: int, isa: str) -> None:
    """All bits of all blocks are the same, beside activations at the ends of their range."""
    stored = np.full_like(_blocks(kind, 70, 1024, 1), bits)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    for block in range(0, stored.shape[1], size):
        for place in HALVES[kind]:
            half = np.array([2.0**-10], dtype="<f2").view(np.uint8)
            stored[:, block + place : block + place + 2] = half
        if kind == Q.MXFP4:
            stored[:, block] = 120
    weights = gguf.quants.dequantize(stored, kind).astype(np.float64)
    x = np.full((13, 1024), 127, dtype=np.float32)
    x[3] = -127
    x[5, 1::2] *= -1
    x[6, 2::4], x[6, 3::4] = -127, -127
    matrix = PackedMatrix(RawTensor(stored, kind.name, 1024), BLOCKS[kind.name], isa=isa)
    out = matrix.multiply(x)
    # of sums that are nearly zero what is left is the rounding of their parts
    size_of_sums = np.abs(x) @ np.abs(weights).T + 1024 * 127 * 63 * 2.0**-10
    assert (np.abs(out - x @ weights.T) <= 2.0**-20 * size_of_sums).all()
    np.testing.assert_array_equal(matrix.multiply(x[:1]), out[:1])


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_what_is_no_number_is_not_hidden(kind: Q, bad: float, isa: str) -> None:
    """Bytes hold no NaN, so something beside them must: a row that has one is all NaN, as one of
    int8 is, and the rows beside it are what they were."""
    stored = _blocks(kind, 40, 512, 6)
    matrix = PackedMatrix(RawTensor(stored, kind.name, 512), BLOCKS[kind.name], isa=isa)
    x = np.random.default_rng(7).normal(size=(9, 512)).astype(np.float32)
    clean = matrix.multiply(x)
    x[2, 5], x[4, 511], x[5] = bad, bad, bad
    out = matrix.multiply(x)
    assert np.isnan(out[[2, 4, 5]]).all()
    others = [0, 1, 3, 6, 7, 8]
    np.testing.assert_array_equal(out[others], clean[others])
    eight = PackedMatrix(RawTensor(stored, kind.name, 512), "int8", isa=isa).multiply(x)
    assert not np.isfinite(eight[[2, 4, 5]]).any()


@pytest.mark.parametrize("isa", levels())
def test_a_row_s_product_is_the_same_whatever_is_beside_it(isa: str) -> None:
    """Of the kind that ``auto`` takes beside q4 and int8, as the benchmark ``levels`` asks."""
    matrix = PackedMatrix(RawTensor(_blocks(Q.MXFP4, 70, 768, 4), "MXFP4", 768), "mxfp4", isa=isa)
    x = np.random.default_rng(6).standard_normal((45, 768)).astype(np.float32)
    together = matrix.multiply(x)
    for row in (0, 1, 5, 44):
        np.testing.assert_array_equal(matrix.multiply(x[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(matrix.multiply(x[:7]), together[:7])


def _file(
    path: Path, kinds: dict[str, Q], experts: int = 0, *, tied: bool = True
) -> GGUFCheckpoint:
    """Two layers, mainly of Q4_K; ``kinds`` of other matrices by the ends of their names."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata: dict[str, Any] = llama_metadata("llama") | {
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 64,
        "llama.vocab_size": VOCAB,
    }
    if experts:
        metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint64(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    shapes = {
        "attn_q": (256, HIDDEN), "attn_k": (128, HIDDEN), "attn_v": (128, HIDDEN),
        "attn_output": (HIDDEN, 256), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    rng = np.random.default_rng(5)
    names = ["token_embd", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in shapes)]
    names += [] if tied else ["output"]
    for seed, name in enumerate(names):
        rows, columns = shapes.get(name.split(".")[-1], (VOCAB, HIDDEN))
        kind = next((k for end, k in kinds.items() if name.endswith(end)), Q.Q4_K)
        if experts and ".ffn_" in name:
            stacked = _blocks(kind, experts * rows, columns, seed).reshape(experts, rows, -1)
            writer.add_tensor(f"{name}_exps.weight", stacked, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", _blocks(kind, rows, columns, seed), raw_dtype=kind)
    for layer in range(LAYERS if experts else 0):
        router = rng.normal(0, HIDDEN**-0.5, (experts, HIDDEN)).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    norms = [f"blk.{i}.{n}" for i in range(LAYERS) for n in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm"]:
        # so small before attention that no key takes all of it, which would magnify any rounding
        size = 0.2 if name.endswith("attn_norm") else 1.0
        norm = rng.uniform(0.5 * size, 1.5 * size, HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def _logits(
    checkpoint: GGUFCheckpoint,
    dtype: str,
    kinds: bytes,
    isa: str | None = None,
    pairs: Pairs | None = None,
) -> NDArray[np.float32]:
    model = NativeModel(
        checkpoint.config, checkpoint_tensors(checkpoint), rotary_tables(checkpoint.config, 32),
        NativeSettings(dtype=dtype, kv_dtype="float32", num_blocks=2, threads=2, kinds=kinds,
            isa=isa),
    )  # fmt: skip
    rows, adapters = np.arange(5), None
    if pairs is not None:
        adapters = [RowAdapter(make_adapter(model, checkpoint.config, pairs), 1.0)]
    out = model.forward(
        rows * 13 % VOCAB, rows, np.array([0, 5]), np.array([[1, 0]]), rows, adapters=adapters
    ).copy()
    model.close()
    return out


@pytest.mark.parametrize("isa", levels())
def test_a_mixed_file_keeps_the_kind_of_each_matrix(tmp_path: Path, isa: str) -> None:
    checkpoint = _file(
        tmp_path / "m.gguf", {"token_embd": Q.Q6_K, "1.attn_v": Q.Q6_K, "ffn_down": Q.Q5_K}
    )
    kinds = choose_kinds(checkpoint, "gguf")
    q4, q5, q6, int8 = (PACKED[name] for name in ("q4_k", "q5_k", "q6_k", "int8"))
    assert kinds.numbers == bytes([q4, q4, q4, q4, q4, q5, q4, q4, q6, q4, q4, q5, q6, q6])
    assert kinds.note == "11 Q4_K, 2 Q5_K, 2 Q6_K in their own bits"
    # q4 keeps those of 4 bits, and what multiplies the same rows as a q of 4 bits
    quick = choose_kinds(checkpoint, "q4")
    assert quick.numbers == bytes([q4] * 5 + [int8, q4, q4, q6, q4, q4] + [int8] * 3)
    assert quick.note.startswith("11 Q4_K, 1 Q6_K in their own bits, 2 Q5_K, 1 Q6_K as int8")
    exact = _logits(checkpoint, "float32", b"")

    def error(dtype: str, numbers: bytes = b"") -> float:
        out = _logits(checkpoint, dtype, numbers, isa)
        return float(np.sqrt(((out - exact) ** 2).mean()) / exact.std())

    rounded = error("q4")
    for numbers in (kinds.numbers, quick.numbers):
        kept = error("q4", numbers)
        assert kept <= 1.2 * error("int8")
        # what the same file loses if its five and six bits become four
        assert rounded > 1.4 * kept


@pytest.mark.parametrize("isa", levels())
def test_an_adapter_adds_to_every_part_of_a_product(tmp_path: Path, isa: str) -> None:
    """Queries, keys and values are three matrices in memory here, of two kinds."""
    checkpoint = _file(tmp_path / "m.gguf", {"0.attn_k": Q.Q6_K, "1.attn_v": Q.Q6_K})
    kinds = choose_kinds(checkpoint, "gguf").numbers
    found = random_pairs(checkpoint.config, 8, modules=MODULES[:3])
    pairs = {key: (4 * a, b) for key, (a, b) in found.items()}
    exact, plain = (_logits(checkpoint, "float32", b"", isa, each) for each in (pairs, None))
    rounded = _logits(checkpoint, "q4", kinds, isa, pairs)
    changed = np.sqrt(((exact - plain) ** 2).mean())
    assert changed > 0.5 * plain.std()
    assert np.sqrt(((rounded - exact) ** 2).mean()) < 0.1 * changed


@pytest.mark.parametrize("isa", levels())
def test_experts_keep_their_kind(tmp_path: Path, isa: str) -> None:
    checkpoint = _file(tmp_path / "m.gguf", {"ffn_down": Q.Q6_K}, experts=3)
    kinds = choose_kinds(checkpoint, "gguf")
    q4, q6, int8 = (PACKED[name] for name in ("q4_k", "q6_k", "int8"))
    assert kinds.numbers == bytes([q4, q4, q4, q4, q4, q6] * LAYERS + [q4, q4])
    assert kinds.note == "21 Q4_K, 6 Q6_K in their own bits"
    quick = choose_kinds(checkpoint, "q4")
    assert quick.numbers == bytes([q4, q4, q4, q4, q4, int8] * LAYERS + [int8, int8])
    exact = _logits(checkpoint, "float32", b"")
    for numbers in (kinds.numbers, quick.numbers):
        out = _logits(checkpoint, "q4", numbers, isa)
        assert np.sqrt(((out - exact) ** 2).mean()) < 0.1 * exact.std()


def test_q_and_what_multiplies_the_same_rows_are_kept_or_bytes(
    tmp_path: Path,
) -> None:
    """With q4: k and v stay beside a q of 4 bits; with another q, or a v that no kernel has, all
    three are int8."""
    q4, q6, int8 = (PACKED[name] for name in ("q4_k", "q6_k", "int8"))
    for kinds, expected in (
        ({"attn_v": Q.Q6_K}, [q4, q4, q6]),
        ({"attn_v": Q.Q6_K, "attn_k": Q.Q6_K}, [q4, q6, q6]),
        ({"attn_q": Q.Q6_K}, [int8] * 3),
        ({"attn_v": Q.Q8_0}, [int8] * 3),
    ):
        checkpoint = _file(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", kinds)
        numbers = choose_kinds(checkpoint, "q4").numbers
        assert numbers[:3] == numbers[6:9] == bytes(expected)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_a_table_that_is_no_head_stays_in_its_bits(tmp_path: Path, kind: Q) -> None:
    checkpoint = _file(tmp_path / "m.gguf", {"token_embd": kind, "output": Q.Q6_K}, tied=False)
    assert not checkpoint.config.tie_word_embeddings
    own, six, int8 = PACKED[BLOCKS[kind.name]], PACKED["q6_k"], PACKED["int8"]
    assert choose_kinds(checkpoint, "gguf").numbers[-2:] == bytes([six, own])
    kinds = choose_kinds(checkpoint, "q4")
    assert kinds.numbers[-2:] == bytes([int8, own])
    exact = _logits(checkpoint, "float32", b"")
    out = _logits(checkpoint, "q4", kinds.numbers)
    assert np.sqrt(((out - exact) ** 2).mean()) < 0.1 * exact.std()
    model = NativeModel(
        checkpoint.config, checkpoint_tensors(checkpoint), rotary_tables(checkpoint.config, 32),
        NativeSettings(dtype="q4", num_blocks=2, threads=1, kinds=kinds.numbers),
    )  # fmt: skip
    told = packed_bytes(checkpoint, "q4")
    assert 0 <= model.weight_bytes - told <= 64 * 2 * (6 * LAYERS + 2)
    model.close()
    # but not what no kernel has
    spoilt = _file(tmp_path / "n.gguf", {"token_embd": Q.Q8_0, "output": Q.Q6_K}, tied=False)
    assert choose_kinds(spoilt, "q4").numbers[-2:] == bytes([int8, int8])


def test_what_no_kernel_has_is_int8(tmp_path: Path) -> None:
    checkpoint = _file(tmp_path / "m.gguf", {"1.attn_v": Q.Q8_0, "0.ffn_up": Q.Q6_K})
    kinds = choose_kinds(checkpoint, "gguf")
    q4, int8 = PACKED["q4_k"], PACKED["int8"]
    # with v in the second layer q and k, which multiply the same rows; with up the gate
    assert kinds.numbers == bytes([q4] * 4 + [int8, q4] + [int8] * 3 + [q4] * 3 + [q4, q4])
    assert kinds.note == (
        "10 Q4_K in their own bits, 3 Q4_K, 1 Q6_K, 1 Q8_0 as int8 (tables, what is multiplied "
        "together with other types, and rows of broken blocks)"
    )
    assert np.isfinite(_logits(checkpoint, "q4", kinds.numbers)).all()


@pytest.mark.parametrize("kind", [Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4], ids=lambda kind: kind.name)
def test_kinds_of_tables_are_kept(tmp_path: Path, kind: Q) -> None:
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    checkpoint = _file(tmp_path / "m.gguf", dict.fromkeys(names, kind))
    assert checkpoint.config.stored_dtype == kind.name
    kinds = choose_kinds(checkpoint, "int8")
    assert kinds.numbers == b"" and kinds.note == f"14 {kind.name}, 1 Q4_K decoded to int8"
    kept = choose_kinds(checkpoint, "gguf")
    assert kept.note == f"14 {kind.name}, 1 Q4_K in their own bits"
    assert set(kept.numbers[:-2]) == {PACKED[BLOCKS[kind.name]]}
    # q4 was asked for by somebody: their grid is not that of q4's blocks
    assert choose_kinds(checkpoint, "q4").numbers == b""
    exact = _logits(checkpoint, "float32", b"")
    # what rounding to int8 costs; values read otherwise would be as far off as others are
    for dtype, numbers in (("int8", b""), ("q4", kept.numbers)):
        out = _logits(checkpoint, dtype, numbers)
        assert np.sqrt(((out - exact) ** 2).mean()) <= 0.1 * exact.std()


def test_only_files_of_4_bits_are_mixed(tmp_path: Path) -> None:
    checkpoint = _file(tmp_path / "m.gguf", {})
    assert set(choose_kinds(checkpoint, "q4").numbers[:-2]) == {PACKED["q4_k"]}
    assert set(choose_kinds(checkpoint, "gguf").numbers) == {PACKED["q4_k"]}
    assert choose_kinds(checkpoint, "int8").note == "15 Q4_K decoded to int8"
    assert choose_kinds(checkpoint, "bfloat16").note == ""
    six = dict.fromkeys(("ffn_down", "ffn_gate", "ffn_up", "attn_output"), Q.Q6_K)
    rounded = choose_kinds(_file(tmp_path / "six.gguf", six), "q4")
    # somebody asked for 4 bits, of a file that has more
    assert rounded.numbers == b"" and rounded.note == ""


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("dtype", ["gguf", "q4", "int8"])
def test_bytes_are_told_without_packing(tmp_path: Path, dtype: str, has_head: bool) -> None:
    mixed = {"token_embd": Q.Q6_K, "1.attn_v": Q.Q6_K, "ffn_down": Q.Q5_K, "attn_output": Q.Q4_0}
    checkpoint = _file(tmp_path / "m.gguf", mixed)
    model = NativeModel(
        checkpoint.config, checkpoint_tensors(checkpoint), rotary_tables(checkpoint.config, 32),
        NativeSettings(dtype="q4" if dtype == "gguf" else dtype, num_blocks=2, threads=1,
            kinds=choose_kinds(checkpoint, dtype).numbers, has_head=has_head),
    )  # fmt: skip
    # each matrix and each row of scales begins at a multiple of 64 bytes
    told = packed_bytes(checkpoint, dtype, has_head=has_head)
    assert 0 <= model.weight_bytes - told <= 64 * 2 * (6 * LAYERS + 1)
    model.close()


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    checkpoint = _file(tmp_path / "m.gguf", {"token_embd": Q.Q6_K, "ffn_down": Q.Q6_K})
    numbers = choose_kinds(checkpoint, "gguf").numbers
    model = NativeModel(
        checkpoint.config, checkpoint_tensors(checkpoint), rotary_tables(checkpoint.config, 32),
        NativeSettings(dtype="q4", num_blocks=2, threads=1, kinds=numbers),
    )  # fmt: skip
    stored = sum(
        checkpoint.raw_tensor(name)[0].nbytes
        for name in checkpoint.tensor_names()
        if len(checkpoint.tensor_shape(name)) == 2
    )
    assert model.weight_bytes == stored
    model.close()
