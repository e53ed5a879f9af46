"""Values of the usual GGUF block types, so that reading one takes numpy alone.

::

    Q4_0  d:f16  qs:16                          d * (q - 8)          32 values
    Q4_1  d:f16  m:f16  qs:16                   d * q + m
    Q5_0  d:f16  qh:4  qs:16                    d * (q - 16)
    Q5_1  d:f16  m:f16  qh:4  qs:16             d * q + m
    Q8_0  d:f16  qs:32                          d * q
    Q2_K  scales:16  qs:64  d:f16  m:f16        d * s * q - m * o    256 values
    Q3_K  high:32  qs:64  scales:12  d:f16      d * (s - 32) * (q - 4)
    Q4_K  d:f16  m:f16  scales:12  qs:128       d * s * q - m * o
    Q5_K  d:f16  m:f16  scales:12  qh:32  qs:128
    Q6_K  ql:128  qh:64  scales:16  d:f16       d * s * (q - 32)

Low nibbles are values before those of high nibbles. Source: the structures of ggml's
``ggml-common.h``; the tests compare with the ``gguf`` package, which reads the other types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.container import GGUFType

__all__ = ["BLOCKS"]

_Bytes: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float32]
# values in a block of the K types
_K: Final = 256


def _f16(blocks: _Bytes, at: int) -> _Floats:
    """Return the half at a byte of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: _Bytes, at: int) -> _Bytes:
    """Return the bits of four bytes as 0 or 16, the lowest first."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits * np.uint8(16)


def _q4_0(blocks: _Bytes) -> _Floats:
    return _f16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: _Bytes) -> _Floats:
    return _f16(blocks, 0) * _nibbles(blocks[:, 4:]) + _f16(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Floats:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _f16(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: _Bytes) -> _Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _f16(blocks, 0) * values + _f16(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Floats:
    return _f16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _pairs(packed: _Bytes) -> _Bytes:
    """Return pairs of bits: 32 bytes hold four times 32 values, the lowest bits first."""
    halves = packed.reshape(len(packed), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (halves >> shifts) & np.uint8(3)


def _scaled(values: NDArray[Any], scales: _Floats) -> _Floats:
    """Return a block's values, each run of them times its scale."""
    runs = values.reshape(len(values), scales.shape[1], -1).astype(np.float32)
    runs *= scales[:, :, None]
    return runs.reshape(len(values), _K)


def _less(values: _Floats, offsets: _Floats) -> _Floats:
    """Return ``values`` less the offset of each run, in place: matrices are large."""
    runs = values.reshape(*offsets.shape, -1)
    runs -= offsets[:, :, None]
    return values


def _q2_k(blocks: _Bytes) -> _Floats:
    scales, d, m = blocks[:, :16], _f16(blocks, 80), _f16(blocks, 82)
    offsets = m * (scales >> 4).astype(np.float32)
    found = _scaled(_pairs(blocks[:, 16:80]), d * (scales & 15).astype(np.float32))
    return _less(found, offsets)


def _q3_k(blocks: _Bytes) -> _Floats:
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(len(blocks), 16)
    scales = _f16(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 2, 4, 1)
    third = (blocks[:, None, None, :32] >> bits) & 1
    values = (_pairs(blocks[:, 32:96]) | (third << 2)).astype(np.float32) - 4
    return _scaled(values, scales)


def _six_bits(packed: _Bytes) -> tuple[_Floats, _Floats]:
    """Return the eight scales and the eight offsets in twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _with_offsets(blocks: _Bytes, values: NDArray[Any]) -> _Floats:
    scales, offsets = _six_bits(blocks[:, 4:16])
    found = _scaled(values, _f16(blocks, 0) * scales)
    return _less(found, _f16(blocks, 2) * offsets)


def _q4_k(blocks: _Bytes) -> _Floats:
    quarters = blocks[:, 16:].reshape(-1, 32)
    return _with_offsets(blocks, _nibbles(quarters).reshape(len(blocks), _K))


def _q5_k(blocks: _Bytes) -> _Floats:
    quarters = blocks[:, 48:].reshape(-1, 32)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> bits) & 1).reshape(len(blocks), _K)
    return _with_offsets(blocks, _nibbles(quarters).reshape(len(blocks), _K) | (fifth << 4))


def _q6_k(blocks: _Bytes) -> _Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(len(blocks), _K)
    high = _pairs(blocks[:, 128:192]).reshape(len(blocks), _K)
    values = (low | (high << 4)).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _scaled(values, _f16(blocks, 208) * scales)


# type -> bytes of a block, and what makes values of rows of blocks
BLOCKS: Final[Mapping[GGUFType, tuple[int, Callable[[_Bytes], _Floats]]]] = {
    GGUFType.Q4_0: (18, _q4_0), GGUFType.Q4_1: (20, _q4_1), GGUFType.Q5_0: (22, _q5_0),
    GGUFType.Q5_1: (24, _q5_1), GGUFType.Q8_0: (34, _q8_0), GGUFType.Q2_K: (84, _q2_k),
    GGUFType.Q3_K: (110, _q3_k), GGUFType.Q4_K: (144, _q4_k), GGUFType.Q5_K: (176, _q5_k),
    GGUFType.Q6_K: (210, _q6_k),
}  # fmt: skip
