"""Packed products against float64, for every variant this machine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.backends.native import (
    NativeModel,
    NativeSettings,
    RawTensor,
    unavailable_reason,
    variants,
)
from paceline.backends.native.packed import PackedCopies
from paceline.backends.native.single_kernels import PackedMatrix, traits
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError
from tests.backends.native.reference import Weights, random_weights, rope_tables, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

ROWS = (1, 2, 3, 4, 5, 8, 12, 13, 14, 27, 64)
SHAPES = ((32, 64), (96, 160), (33, 96), (70, 32), (1, 32), (40, 576))


def _random(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def _bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def _steps(x: NDArray[np.float32], group: int, fours: bool = False) -> NDArray[np.float64]:
    """x rounded to 127 steps of its largest magnitude in each group of columns. With ``fours``
    steps are also so large that no columns (0, 1) or (2, 3) of two consecutive runs of four add up
    to more than 126.99 of one sign."""
    columns = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -columns % group)))
    grouped = padded.reshape(len(x), -1, group)
    top = np.abs(grouped).max(-1, keepdims=True)
    if fours:
        parts = grouped.reshape(*grouped.shape[:2], -1, 2, 2, 2)
        for sign in (1, -1):
            sums = np.maximum(sign * parts, 0).sum((-1, -3)).reshape(*grouped.shape[:2], -1)
            top = np.maximum(top, sums.max(-1, keepdims=True) * np.float32(127 / 126.99))
    factor = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    steps = np.round(grouped * factor).astype(np.float64) * (top / np.float32(127))
    return steps.reshape(padded.shape)[:, :columns]


def _rotated(x: NDArray[Any]) -> NDArray[np.float64]:
    """Every whole group of 64 columns times the orthonormal Hadamard matrix of order 64."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 64:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    rotated = x.astype(np.float64)
    for begin in range(0, x.shape[1] - 63, 64):
        rotated[:, begin : begin + 64] = rotated[:, begin : begin + 64] @ hadamard / 8
    return rotated


def _as_multiplied(x: NDArray[np.float32], dtype: str, isa: str) -> NDArray[np.float64]:
    if dtype == "bfloat16" and not traits(isa).float_activations:
        return _bf16(x).astype(np.float64)
    if dtype == "int8":
        # the rotation is its own inverse
        return _rotated(_steps(_rotated(x).astype(np.float32), 64, traits(isa).narrow_sums))
    return _steps(x, 32) if dtype == "q4" else x.astype(np.float64)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_exact_on_what_it_multiplies(
    isa: str, dtype: str, shape: tuple[int, int]
) -> None:
    matrix = PackedMatrix(_random(shape, 1), dtype, isa=isa)
    weights = matrix.unpack().astype(np.float64)
    for rows in ROWS:
        x = _random((rows, shape[1]), rows)
        expected = _as_multiplied(x, dtype, isa) @ weights.T
        scale = np.abs(_as_multiplied(x, dtype, isa)) @ np.abs(weights.T)
        error = np.abs(matrix.multiply(x) - expected) / scale
        # a value that lands on a rounding boundary may go either way, once in thousands, and takes
        # its whole row along; the rotation's own rounding brings more of them there
        assert np.quantile(error, 0.9 if dtype == "int8" else 0.99) < 2e-6
        assert error.max() < (2e-3 if dtype in ("int8", "q4") else 2e-6)


@settings(max_examples=60)
@given(
    isa=st.sampled_from(variants() or ("",)),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "q4"]),
    outputs=st.integers(1, 200),
    columns=st.integers(1, 300),
    rows=st.integers(1, 70),
    threads=st.integers(1, 3),
)
def test_random_shapes(
    isa: str, dtype: str, outputs: int, columns: int, rows: int, threads: int
) -> None:
    if dtype == "q4":
        columns = -(-columns // 32) * 32
    matrix = PackedMatrix(_random((outputs, columns), 1), dtype, isa=isa, threads=threads)
    x = _random((rows, columns), 2)
    weights = matrix.unpack().T.astype(np.float64)
    error = np.abs(matrix.multiply(x) - _as_multiplied(x, dtype, isa) @ weights)
    scale = np.abs(_as_multiplied(x, dtype, isa)) @ np.abs(weights)
    # as above; a row of few columns has few values that could share a boundary's step
    bound = 2e-6 if dtype in ("float32", "bfloat16") else 2e-2
    np.testing.assert_array_less(error, bound * scale + 1e-6)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 31, 67, 130])
def test_odd_numbers_of_columns(isa: str, dtype: str, columns: int) -> None:
    matrix = PackedMatrix(_random((40, columns), 2), dtype, isa=isa)
    x = _random((6, columns), 3)
    expected = _as_multiplied(x, dtype, isa) @ matrix.unpack().T.astype(np.float64)
    np.testing.assert_allclose(matrix.multiply(x), expected, atol=2e-5 * columns)


@pytest.mark.parametrize("isa", variants())
def test_large_activations_leave_the_others_their_digits(isa: str) -> None:
    """One input of 64 is a hundred times the others: with steps of that input's size, the others
    would lose half of their digits."""
    weights, x = _random((40, 256), 9), _random((8, 256), 10)
    x[:, 5::64] *= 100
    expected = x.astype(np.float64) @ weights.T
    matrix = PackedMatrix(weights, "int8", isa=isa)
    error = matrix.multiply(x) - x.astype(np.float64) @ matrix.unpack().T
    unrotated = _steps(x, 64) @ weights.T - expected
    # half of a large value's four have its sign, which doubles steps where they share 16 bits
    better = 2 if traits(isa).narrow_sums else 4
    assert np.sqrt((error**2).mean()) < np.sqrt((unrotated**2).mean()) / better


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("shape", [(50, 160), (33, 64), (7, 63), (65, 193)])
def test_int8_weights_are_packed_alike_on_every_level(isa: str, shape: tuple[int, int]) -> None:
    """Halves of panels, columns outside whole groups and units, rows of zeros and of what is too
    small to have steps."""
    weights = _random(shape, 6)
    weights[3], weights[5] = 0, 1e-42
    found = PackedMatrix(weights, "int8", isa=isa).unpack()
    np.testing.assert_array_equal(found, PackedMatrix(weights, "int8", isa="portable").unpack())
    np.testing.assert_array_equal(found[[3, 5]], 0)
    # a whole number of steps of each row, 127 of the largest
    turned = _rotated(found.astype(np.float64))
    step = np.abs(turned).max(1, keepdims=True) / 127
    steps = turned / np.where(step > 0, step, 1)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)


@dataclass(frozen=True, slots=True)
class _Kept(PackedCopies):
    """What a model packed, and never a copy to read."""

    packed: list[bytes] = field(default_factory=list)

    def read(self, about: Mapping[str, object], pieces: Sequence[memoryview]) -> bool:
        return False

    def write(self, about: Mapping[str, object], pieces: Sequence[memoryview]) -> None:
        self.packed.extend(map(bytes, pieces))


def _packed(weights: Weights, config: ModelConfig, isa: str) -> list[bytes]:
    kept = _Kept(Path("nowhere"), 0, "")
    NativeModel(
        config, weights.items(), rope_tables(config, 16),
        NativeSettings(dtype="int8", num_blocks=1, threads=1, isa=isa), copies=kept,
    ).close()  # fmt: skip
    return kept.packed


@pytest.mark.parametrize("isa", variants())
def test_a_row_that_is_no_number_has_the_bytes_of_zeros_on_every_level(isa: str) -> None:
    """No byte stands for such a value: the scale says it, in the same bits everywhere."""
    config = tiny_config()
    weights = random_weights(config, 20)
    name = "model.layers.0.mlp.gate_proj.weight"
    broken, zeroed = weights[name].copy(), weights[name].copy()
    # in a group of 64 columns and behind it; infinities of two signs rotate to what is no number
    rows = [2, 7, 20, 33, 40, 64, 90]
    places = [(5,), (95,), (63,), (70,), (3, 4), (1,), (1,)]
    values = [(np.nan,), (np.nan,), (np.inf,), (-np.inf,), (np.inf, -np.inf), (-np.nan,), (3e38,)]
    for row, columns, numbers in zip(rows, places, values, strict=True):
        broken[row, columns] = numbers
    broken[90, 2] = 3e38
    # the sums of some lanes go beyond float32 both ways, and that of the first does not
    rows.append(50)
    broken[50, :8] = 1e38 * np.array([3, -3, 3, -3, 3, -3, -3, 3], dtype=np.float32)
    zeroed[rows] = 0
    found = _packed(weights | {name: broken}, config, isa)
    assert found == _packed(weights | {name: broken}, config, "portable")
    expected = _packed(weights | {name: zeroed}, config, "portable")
    differing = [place for place, piece in enumerate(found) if piece != expected[place]]
    (scales,) = differing
    told, zeros = (np.frombuffer(p[scales], dtype=np.float32) for p in (found, expected))
    (at,) = np.nonzero(told.view(np.uint32) != zeros.view(np.uint32))
    assert len(at) == len(rows) and not np.isfinite(told[at]).any()


def test_int8_weights_are_rounded_after_the_rotation() -> None:
    weights = _random((50, 160), 6)
    weights[:, 70] = 40
    # one step for a row, of the largest value that is left when 40 is spread over 64 columns
    step = np.abs(_rotated(weights)).max(1) / 127
    error = _rotated(PackedMatrix(weights, "int8").unpack()) - _rotated(weights)
    np.testing.assert_array_less(np.abs(error).max(1), step * 0.501)
    assert step.max() < 10 / 127


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_give_the_same_numbers(threads: int) -> None:
    weights, x = _random((300, 64), 4), _random((21, 64), 5)
    one = PackedMatrix(weights, "bfloat16").multiply(x)
    many = PackedMatrix(weights, "bfloat16", threads=threads).multiply(x, repeat=3)
    np.testing.assert_array_equal(one, many)


# quantisation error relative to the largest weight of a group or row
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 60), ("q4", 1 / 14)]
)
def test_packing_keeps_the_weights(dtype: str, bound: float) -> None:
    weights = _random((50, 96), 6)
    error = np.abs(PackedMatrix(weights, dtype).unpack() - weights)
    assert error.max() <= bound * np.abs(weights).max()
    if bound:
        assert error.max() > 0


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "q4"])
def test_stored_blocks_are_read_as_gguf_means_them(name: str, dtype: str) -> None:
    weights = _random((37, 64), 7)
    weights[0] *= 1e-6  # scales that are subnormal in half precision
    kind = GGMLQuantizationType[name]
    stored = quants.quantize(weights, kind).view(np.uint8)
    expected = quants.dequantize(stored, kind)
    matrix = PackedMatrix(RawTensor(stored, name, 64), dtype)
    if dtype == "float32" or name.startswith("Q4"):
        # the minimum of a Q4_0 group is rounded to half precision
        np.testing.assert_allclose(matrix.unpack(), expected, rtol=1e-6, atol=1e-7)
    else:
        assert np.abs(matrix.unpack() - expected).max() < np.abs(expected).max() / 14


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("columns", [64, 128, 56])
def test_no_sum_of_bytes_leaves_its_register(isa: str, sign: int, columns: int) -> None:
    """Four activations that share 16 bits are at their largest, beside the largest weights."""
    x = np.zeros((5, columns), dtype=np.float32)
    # in the rotated basis, which is where bytes are multiplied; columns that fill no group are not
    for row, places in enumerate(((0, 1, 4, 5), (2, 3, 6, 7), (0, 1), tuple(range(8)), (5,))):
        x[row, list(places)] = sign
    weights = np.ones((32, columns), dtype=np.float32)
    weights[16:] = -1
    if columns >= 64:
        x, weights = (_rotated(array).astype(np.float32) for array in (x, weights))
    matrix = PackedMatrix(weights, "int8", isa=isa)
    expected = x.astype(np.float64) @ matrix.unpack().T
    # steps of half of what four columns have at most, and five rows that take tiles of two shapes
    np.testing.assert_allclose(matrix.multiply(x), expected, rtol=0.02)
    np.testing.assert_allclose(matrix.multiply(x[:1]), expected[:1], rtol=0.02)


def _q4_blocks(
    scales: NDArray[np.float16], minimums: NDArray[np.float16] | None, nibbles: int | None = None
) -> RawTensor:
    """Rows of blocks with these scales [rows, groups]: of Q4_1, or of Q4_0 without minimums. The
    nibbles are random, or all the same."""
    low, high = (0, 16) if nibbles is None else (nibbles, nibbles + 1)
    values = np.random.default_rng(8).integers(low, high, (*scales.shape, 2, 16), dtype=np.uint8)
    halves = scales[..., None] if minimums is None else np.stack((scales, minimums), axis=-1)
    packed = values[:, :, 0] | values[:, :, 1] << 4
    blocks = np.concatenate((halves.astype("<f2").view(np.uint8), packed), axis=-1)
    name = "Q4_1" if minimums is not None else "Q4_0"
    return RawTensor(blocks.reshape(len(scales), -1), name, 32 * scales.shape[1])


def test_scales_of_4_bits_are_whole_steps_of_their_row() -> None:
    """As good as in the file, but where a group's scale is far below the row's largest."""
    random = np.random.default_rng(9)
    scales = random.uniform(0.06, 1, (40, 12)).astype(np.float16)
    scales[20:] *= (10.0 ** random.uniform(-6, 0, (20, 12))).astype(np.float16)
    minimums = (-7.5 * scales * random.uniform(0.9, 1.1, scales.shape)).astype(np.float16)
    for lows in (minimums, None):
        raw = _q4_blocks(scales, lows)
        expected = quants.dequantize(raw.data, GGMLQuantizationType[raw.type])
        unpacked = PackedMatrix(raw, "q4").unpack()
        np.testing.assert_allclose(unpacked[:20], expected[:20], rtol=2e-7, atol=2e-7)
        # half a step of 2^-14 of the largest at most: 8 times of the scale, and of the minimum
        top = np.abs(scales[20:].astype(np.float64)).max(axis=1, keepdims=True)
        error = np.abs(unpacked[20:] - expected[20:])
        assert (error <= 4.5 * 2.0**-14 * top + 1e-7).all()
        assert error.max() > 1e-6


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("nibble", [0, 15])
@pytest.mark.parametrize("minimum", [None, -30.0, 1.9, 30.0])
def test_no_sum_of_nibbles_leaves_its_register(
    isa: str, sign: int, nibble: int, minimum: float | None
) -> None:
    """All activations are at their largest, beside the largest weights of the largest scale."""
    # 11 bits, all of them ones: the largest part of a power of two
    scales = np.full((70, 3), 1.9990234375 * sign, dtype=np.float16)
    lows = None if minimum is None else np.full_like(scales, minimum)
    matrix = PackedMatrix(_q4_blocks(scales, lows, nibble), "q4", isa=isa)
    weights = matrix.unpack().astype(np.float64)
    x = np.full((7, 96), 127, dtype=np.float32)
    x[3] = -127
    x[5, 1::2] *= -1
    np.testing.assert_allclose(matrix.multiply(x), x @ weights.T, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("place", ["scale", "minimum"])
def test_a_broken_scale_of_4_bits_is_not_hidden(isa: str, bad: float, place: str) -> None:
    scales, minimums = np.ones((40, 4), np.float16), np.zeros((40, 4), np.float16)
    good = PackedMatrix(_q4_blocks(scales, minimums), "q4", isa=isa)
    (scales if place == "scale" else minimums)[7, 2] = bad
    broken = PackedMatrix(_q4_blocks(scales, minimums), "q4", isa=isa)
    x = _random((9, 128), 13)
    expected = good.multiply(x)
    expected[:, 7] = np.nan
    np.testing.assert_array_equal(broken.multiply(x), expected)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("columns", [128, 96])
def test_a_weight_that_is_no_number_is_not_hidden(
    isa: str, dtype: str, bad: float, columns: int
) -> None:
    """Bytes and nibbles hold no such number, so the scale of its row says it."""
    weights, x = _random((40, columns), 14), _random((9, columns), 15)
    expected = PackedMatrix(weights, dtype, isa=isa).multiply(x)
    # first and last of what is looked at together, and in columns that fill no group of 64
    for row, column in ((7, 5), (20, 32), (21, 63), (39, columns - 1)):
        weights[row, column] = bad
        expected[:, row] = np.nan
    out = PackedMatrix(weights, dtype, isa=isa).multiply(x)
    broken = np.isnan(expected)
    assert not np.isfinite(out[broken]).any()
    np.testing.assert_array_equal(out[~broken], expected[~broken])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
@pytest.mark.parametrize("dtype", ["int8", "q4"])
def test_a_broken_half_of_a_file_is_not_hidden(name: str, dtype: str, bad: float) -> None:
    stored = quants.quantize(_random((40, 128), 16), GGMLQuantizationType[name]).view(np.uint8)
    x = _random((5, 128), 17)
    expected = PackedMatrix(RawTensor(stored, name, 128), dtype).multiply(x)
    # a block's scale, or one value
    stored[7, 34:36] = np.array([bad], dtype="<f2").view(np.uint8)
    out = PackedMatrix(RawTensor(stored, name, 128), dtype).multiply(x)
    assert not np.isfinite(out[:, 7]).any()
    others = np.arange(40) != 7
    np.testing.assert_array_equal(out[:, others], expected[:, others])


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_long_rows(isa: str, dtype: str, sign: int) -> None:
    """16,384 columns of the largest numbers, alone and among others, by several threads."""
    columns = 16384
    if dtype == "q4":
        scales = np.full((45, columns // 32), 1.9990234375 * sign, dtype=np.float16)
        weights: Any = _q4_blocks(scales, np.full_like(scales, 30.0), 15)
    else:
        # in the rotated basis, which is where bytes are multiplied, all are the largest
        weights = np.full((45, columns), sign, dtype=np.float32)
        weights = _rotated(weights).astype(np.float32) if dtype == "int8" else weights
    matrix = PackedMatrix(weights, dtype, isa=isa)
    x = np.full((13, columns), 127, dtype=np.float32)
    x[3] = -127
    x[5, 1::2] *= -1
    x[8:] = _random((5, columns), 18)
    if dtype == "int8":
        x = _rotated(x).astype(np.float32)
    out = matrix.multiply(x)
    expected = _as_multiplied(x, dtype, isa) @ matrix.unpack().T.astype(np.float64)
    size = np.abs(_as_multiplied(x, dtype, isa)) @ np.abs(matrix.unpack()).T
    assert (np.abs(out - expected) <= 2e-4 * size).all()
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(matrix.multiply(x[:rows]), out[:rows])
    many = PackedMatrix(weights, dtype, isa=isa, threads=3)
    np.testing.assert_array_equal(many.multiply(x), out)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize("columns", [576, 160, 67])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, dtype: str, columns: int) -> None:
    if dtype == "q4":
        columns = columns // 32 * 32
    matrix = PackedMatrix(_random((70, columns), 1), dtype, isa=isa)
    x = _random((64, columns), 2)
    whole = matrix.multiply(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 31):
        np.testing.assert_array_equal(matrix.multiply(x[:rows]), whole[:rows])
        np.testing.assert_array_equal(matrix.multiply(x[-rows:]), whole[-rows:])


def test_four_bits_need_whole_groups() -> None:
    with pytest.raises(ConfigError, match="got 48"):
        PackedMatrix(_random((4, 48), 8), "q4")


def test_what_was_closed_is_refused() -> None:
    matrix = PackedMatrix(_random((4, 32), 8), "float32")
    matrix.close()
    matrix.close()
    for use in (matrix.unpack, lambda: matrix.multiply(_random((1, 32), 8))):
        with pytest.raises(ConfigError, match="this PackedMatrix is closed"):
            use()


def test_unknown_variant_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="portable"):
        PackedMatrix(_random((4, 32), 8), "float32", isa="mmx")


@pytest.mark.parametrize("dtype", ["int8", "q4"])
def test_rows_of_zeros(dtype: str) -> None:
    matrix = PackedMatrix(np.zeros((8, 32), dtype=np.float32), dtype)
    np.testing.assert_array_equal(matrix.multiply(np.zeros((3, 32), dtype=np.float32)), 0)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["int8", "q4"])
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("tiny", [1e-36, 1e-37, 1e-38, 1e-45])
def test_groups_too_small_for_steps_are_nothing(
    isa: str, dtype: str, columns: int, tiny: float
) -> None:
    """127 over the largest is more than float32 holds, and that times zero is not a number."""
    x, weights = _random((6, columns), 11), _random((40, columns), 12)
    x[:, :64] = 0
    matrix = PackedMatrix(weights, dtype, isa=isa)
    expected = matrix.multiply(x)
    x[1, 3] = tiny
    x[2, :32] = tiny
    x[3, :64] = -tiny
    x[4] = tiny
    expected[4] = 0
    np.testing.assert_allclose(matrix.multiply(x), expected, rtol=0, atol=1e-30)
