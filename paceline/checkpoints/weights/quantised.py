"""Matrices that a Hugging Face folder stores in 8 or 4 bits: FP8, GPTQ and AWQ. Reading of
config.json is in ``checkpoints/hf/config.py``.

A weight is ``[outputs, inputs]`` here, in any stored layout::

    FP8    weight           F8_E4M3 [out, in]
           weight_scale     one number, [out] or [out, 1]; or one for each block of rows and
           weight_scale_inv columns, which is a factor too, despite its name
    GPTQ   qweight          I32 [in / n, out]: n inputs in an integer, the first in the lowest bits
           qzeros           I32 [groups, out / n], minus one except in "gptq_v2"
           scales           [groups, out]
           g_idx            I32 [in], the group of each input; without it, or where it agrees, runs
                            of group_size inputs are a group, else desc_act was in use
    AWQ    qweight          I32 [in, out / 8], eight outputs in an integer: 0 2 4 6 1 3 5 7
           qzeros           I32 [groups, out / 8], likewise
           scales           [groups, out]

and is ``weight * scale``, or ``(quantised - zero) * scale`` of its input's group.

Sources of these layouts: transformers' ``integrations/finegrained_fp8.py`` and vLLM's
``quantization/fp8.py``; AutoGPTQ's ``qlinear_cuda_old.py`` and, on zeros, the "gptq_v2" of
GPTQModel; AutoAWQ's ``utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.weights.safetensors import DTYPES, SafetensorsEntry, read_data, values_of
from paceline.errors import CheckpointError

__all__ = ["FP8", "INSTEAD", "MXFP4", "Q4", "Quantisation", "QuantisedMatrix"]

# stored types of matrices: floating-point bytes; 8-bit integers; 4 bits in blocks that GGUF has
# too; and 4 bits in another order, or with scales that are not halves
FP8: Final = "FP8"
# 4-bit floating point, for experts alone; see ``stacked_experts``
MXFP4: Final = "MXFP4"
_INT8: Final = "INT8"
Q4: Final = "Q4_1"
_INT4: Final = "INT4"

# for messages: the supported kinds, and alternatives to others
_READ: Final = (
    "FP8 (fp8, fbgemm_fp8, or float-quantized of compressed-tensors), GPTQ of 4 or 8 bits, AWQ "
    "of 4 (gemm) and gpt-oss's MXFP4 are read"
)
INSTEAD: Final = f"use a GGUF file of the model or its unquantised folder; {_READ}"
# values in a block of GGUF's Q4_1
_BLOCK: Final = 32
# values unpacked at a time: at once, a matrix would take several times its final memory
_AT_ONCE: Final = 1 << 17
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
# tensors that quantise something other than weights: inputs of a layer, or keys and values
_UNUSED: Final = (
    ".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale", ".q_scale",
    ".k_scale", ".v_scale",
)  # fmt: skip


class QuantisedMatrix(Protocol):
    """A matrix made of several stored tensors."""

    @property
    def path(self) -> Path:
        """The file that holds the first of these tensors."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all these tensors."""

    def part(self, rows: slice) -> QuantisedMatrix:
        """Return the matrix of some of its rows."""

    def values(self) -> NDArray[np.float32]:
        """Return the values in float32. Products are rounded to it for FP8 and for scales that are
        not halves; other values are exact."""

    def blocks(self) -> NDArray[np.uint8]:
        """Return the rows of ``Q4`` or ``MXFP4`` as GGUF's blocks, [rows, bytes]. They are exact,
        except for zeros of Q4 other than 8: the offset ``-zero * scale`` is rounded to a half, by
        at most 1/128 of the step between two values."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """``quantization_config`` of a folder, as far as it describes the storage of weights."""

    # "FP8", "GPTQ", "AWQ" or "MXFP4"
    method: str
    bits: int = 8
    # inputs that share a scale; -1: all of them
    group_size: int = -1
    # added to a stored zero
    zero_offset: int = 0
    # rows and columns of FP8 that share a scale
    block: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """Description for users."""
        if self.method in (FP8, MXFP4):
            return self.method
        groups = "" if self.group_size == -1 else f" in groups of {self.group_size}"
        return f"{self.method} of {self.bits} bits{groups}"

    def take(
        self, entries: Mapping[str, SafetensorsEntry]
    ) -> dict[str, SafetensorsEntry | QuantisedMatrix]:
        """Return stored tensors by name, with those that make up a matrix combined.

        Raises:
            CheckpointError: a matrix lacks a part, its parts disagree, or there is none.
        """
        found: dict[str, SafetensorsEntry | QuantisedMatrix] = dict(entries)
        if self.method == MXFP4:
            # experts are in stacks, which the architecture takes apart
            return found
        count = 0
        for name, entry in entries.items():
            if self.method == FP8 and name.endswith(".weight") and entry.dtype == "F8_E4M3":
                base = name.removesuffix(".weight")
                found[name] = self._scaled(base, entry, found)
            elif self.method != FP8 and name.endswith(".qweight"):
                base = name.removesuffix(".qweight")
                found[f"{base}.weight"] = self._packed(base, found)
            else:
                if name.endswith(_UNUSED):
                    del found[name]
                continue
            count += 1
        if not count:
            raise CheckpointError(
                f"quantization_config says {self.text}, and no tensor is stored so"
            )
        return found

    def _scaled(
        self,
        base: str,
        weight: SafetensorsEntry,
        found: dict[str, SafetensorsEntry | QuantisedMatrix],
    ) -> QuantisedMatrix:
        for name in (f"{base}.weight_scale", f"{base}.weight_scale_inv"):
            if isinstance(scale := found.pop(name, None), SafetensorsEntry):
                break
        else:
            raise CheckpointError(f"{base}.weight is FP8 and has no weight_scale")
        if len(weight.shape) != 2:
            raise CheckpointError(
                f"{base}.weight is FP8 of shape {list(weight.shape)}: only matrices are"
            )
        if not all(weight.shape):
            raise CheckpointError(f"{base}.weight has shape {list(weight.shape)}: it is empty")
        _check_scales(name, scale)
        rows, columns = weight.shape
        block = self.block or (1, columns)
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        if self.block is not None and scale.shape == blocks:
            return _Scaled(weight, scale, block, slice(0, rows))
        if scale.shape in ((), (1,), (1, 1)):
            return _Scaled(weight, scale, (rows, columns), slice(0, rows))
        if scale.shape in ((rows,), (rows, 1)):
            return _Scaled(weight, scale, (1, columns), slice(0, rows))
        raise CheckpointError(
            f"{base}.weight of shape {[rows, columns]} has scales of shape {list(scale.shape)}: "
            f"one, one for each row, or {list(blocks)} are read"
        )

    def _packed(
        self, base: str, found: dict[str, SafetensorsEntry | QuantisedMatrix]
    ) -> QuantisedMatrix:
        parts: dict[str, SafetensorsEntry] = {}
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            part = found.pop(f"{base}.{name}", None)
            if isinstance(part, SafetensorsEntry):
                parts[name] = part
            elif name != "g_idx":
                raise CheckpointError(f"{base}.qweight is {self.method} and has no {name}")
        qweight, scales, each = parts["qweight"], parts["scales"], 32 // self.bits
        shape = qweight.shape if len(qweight.shape) == 2 else (0, 0)
        is_awq = self.method == "AWQ"
        outputs, inputs = (shape[1] * each, shape[0]) if is_awq else (shape[1], shape[0] * each)
        if len(qweight.shape) == 2 and not (inputs and outputs):
            raise CheckpointError(f"{base}.qweight has shape {list(qweight.shape)}: it is empty")
        if outputs % each:
            raise CheckpointError(
                f"{base}.qweight has shape {list(qweight.shape)}, {outputs} outputs: {self.text} "
                f"has a multiple of {each}, since so many zeros lie in one integer"
            )
        _check_scales(f"{base}.scales", scales)
        size = inputs if self.group_size == -1 else min(self.group_size, inputs)
        groups = -(-inputs // max(size, 1))
        wanted: dict[str, tuple[int, ...]] = {
            "qzeros": (groups, outputs // each),
            "scales": (groups, outputs),
        }
        if "g_idx" in parts:
            wanted["g_idx"] = (inputs,)
        for name, expected in wanted.items():
            if not inputs or parts[name].shape != expected:
                raise CheckpointError(
                    f"{base}.{name} has shape {list(parts[name].shape)} with a qweight of "
                    f"{list(qweight.shape)}; {self.text} implies {list(expected)}"
                )
        for name, part in parts.items():
            if name != "scales" and part.dtype != "I32":
                raise CheckpointError(f"{base}.{name} is stored as {part.dtype}, must be I32")
        order = None
        if "g_idx" in parts:
            order = np.frombuffer(read_data(parts["g_idx"]), "<i4").astype(np.int64)
            if order.min() < 0 or order.max() >= groups:
                raise CheckpointError(f"{base}.g_idx names groups that are not among its {groups}")
            if np.array_equal(order, np.arange(inputs) // size):
                order = None
        dtype = _INT8 if self.bits == 8 else _INT4
        in_blocks = order is None and not size % _BLOCK and not inputs % _BLOCK
        if self.bits == 4 and in_blocks and _are_halves(scales):
            dtype = Q4
        return _Packed(
            qweight, parts["qzeros"], scales, dtype, self.bits, size, self.zero_offset, is_awq,
            order, slice(0, outputs),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Scaled:
    """FP8 with scales for blocks of rows and columns."""

    weight: SafetensorsEntry
    scale: SafetensorsEntry
    block: tuple[int, int]
    rows: slice

    @property
    def path(self) -> Path:
        return self.weight.path

    @property
    def dtype(self) -> str:
        return FP8

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + self.scale.num_bytes

    def part(self, rows: slice) -> QuantisedMatrix:
        return replace(self, rows=_within(self.rows, rows))

    def values(self) -> NDArray[np.float32]:
        columns = self.weight.shape[1]
        first = self.weight.start + self.rows.start * columns
        part = replace(
            self.weight, start=first, shape=self.shape, num_bytes=self.shape[0] * columns
        )
        codes = np.frombuffer(read_data(part), np.uint8).reshape(self.shape)
        scales = values_of(self.scale).reshape(-1, -(-columns // self.block[1]))
        row_blocks = np.arange(self.rows.start, self.rows.stop) // self.block[0]
        column_blocks = np.arange(columns) // self.block[1]
        found, step = np.empty(self.shape, np.float32), max(1, _AT_ONCE // columns)
        for some in (slice(first, first + step) for first in range(0, len(found), step)):
            found[some] = _e4m3()[codes[some]]
            found[some] *= scales[row_blocks[some]][:, column_blocks]
        return found

    def blocks(self) -> NDArray[np.uint8]:
        raise CheckpointError("FP8 has no blocks of 4 bits")


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """Integers of 4 or 8 bits, packed into integers of 32."""

    qweight: SafetensorsEntry
    qzeros: SafetensorsEntry
    scales: SafetensorsEntry
    dtype: str
    bits: int
    group_size: int
    zero_offset: int
    is_awq: bool
    # the group of each input; None: runs of group_size
    order: NDArray[np.int64] | None
    # outputs of this part
    rows: slice

    @property
    def path(self) -> Path:
        return self.qweight.path

    @property
    def shape(self) -> tuple[int, ...]:
        inputs = self.qweight.shape[0] * (1 if self.is_awq else 32 // self.bits)
        return (self.rows.stop - self.rows.start, inputs)

    @property
    def num_bytes(self) -> int:
        return self.qweight.num_bytes + self.qzeros.num_bytes + self.scales.num_bytes

    def part(self, rows: slice) -> QuantisedMatrix:
        return replace(self, rows=_within(self.rows, rows))

    def values(self) -> NDArray[np.float32]:
        zeros, scales = self._groups()
        order = self.order
        if order is None:
            order = np.arange(self.shape[1]) // self.group_size
        found = np.empty(self.shape, np.float32)
        for rows, numbers in self._numbers():
            # an integer of up to 9 bits times a half: exact
            part = (numbers - zeros[order, rows]).astype(np.float32)
            part *= scales[order, rows]
            found[rows] = part.T
        return found

    def blocks(self) -> NDArray[np.uint8]:
        if self.dtype != Q4:
            raise CheckpointError(f"{self.dtype} has no blocks of 4 bits")
        zeros, scales = self._groups()
        rows, count = self.shape[0], self.shape[1] // _BLOCK
        found = np.empty((rows, count, 4 + _BLOCK // 2), np.uint8)
        # first the scale, then the offset of each block
        for place, part in enumerate((scales, -zeros * scales)):
            halves = np.repeat(part.T.astype("<f2"), self.group_size // _BLOCK, axis=1)[:, :count]
            pairs = np.ascontiguousarray(halves).view(np.uint8).reshape(rows, count, 2)
            found[..., 2 * place : 2 * place + 2] = pairs
        for some, numbers in self._numbers():
            nibbles = numbers.T.reshape(-1, count, _BLOCK).astype(np.uint8)
            # the first half of a block is in the lower bits
            found[some, :, 4:] = nibbles[..., : _BLOCK // 2] | nibbles[..., _BLOCK // 2 :] << 4
        return found.reshape(rows, -1)

    def _groups(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return zeros and scales, [groups, rows]."""
        packed = _integers(self.qzeros)
        unpacked = (
            _columns(packed, self.bits, _AWQ_ORDER) if self.is_awq else _unpacked(packed, self.bits)
        )
        zeros = unpacked[:, self.rows] + np.int32(self.zero_offset)
        return zeros, values_of(self.scales)[:, self.rows]

    def _numbers(self) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Yield rows and their numbers [inputs, rows], some rows at a time."""
        packed, each = _integers(self.qweight), 32 // self.bits
        step = max(1, _AT_ONCE // (self.shape[1] * each)) * each
        first, stop = self.rows.start, self.rows.stop
        while first < stop:
            # begin at a whole integer, which holds several rows of AWQ
            begin = first // each
            last = min(begin * each + step, stop)
            if self.is_awq:
                held = _columns(packed[:, begin : -(-last // each)], self.bits, _AWQ_ORDER)
                numbers = held[:, first - begin * each : last - begin * each]
            else:
                numbers = _unpacked(packed[:, first:last].T, self.bits).T
            yield slice(first - self.rows.start, last - self.rows.start), numbers
            first = last


def _check_scales(name: str, scales: SafetensorsEntry) -> None:
    if scales.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} is stored as {scales.dtype}; scales of {', '.join(DTYPES)} are read: {INSTEAD}"
        )


def _are_halves(scales: SafetensorsEntry) -> bool:
    """Return whether float16, the type of scales in blocks, holds all scales exactly."""
    if scales.dtype == "F16":
        return True
    values = values_of(scales)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _integers(entry: SafetensorsEntry) -> NDArray[np.uint32]:
    return np.frombuffer(read_data(entry), "<u4").reshape(entry.shape)


def _unpacked(packed: NDArray[np.uint32], bits: int) -> NDArray[np.int32]:
    """Unpack [rows, columns] to [rows, columns * n], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = packed[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return found.reshape(len(packed), -1).astype(np.int32)


def _columns(packed: NDArray[np.uint32], bits: int, order: tuple[int, ...]) -> NDArray[np.int32]:
    """Unpack as ``_unpacked`` does integers that hold their columns in ``order``."""
    found = _unpacked(packed, bits)
    places = np.argsort(order)
    return found.reshape(len(packed), -1, len(order))[:, :, places].reshape(len(packed), -1)


@cache
def _e4m3() -> NDArray[np.float32]:
    """Return the value of each byte: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no
    infinity, and one NaN of each sign."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    size[codes & 127 == 127] = np.nan
    return np.where(codes >> 7, -size, size).astype(np.float32)
