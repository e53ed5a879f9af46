"""Single kernels of the native path, for tests and benchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.backends.native.library import Owner, Step, check, library
from paceline.backends.native.model import Integers, NativeModel
from paceline.backends.native.tensors import PACKED, TYPES, RawTensor, Tensor

__all__ = [
    "PackedMatrix",
    "Traits",
    "attend",
    "cache_bytes",
    "clock_hz",
    "peak_rate",
    "products_seconds",
    "read_bandwidth",
    "traits",
    "variants_for",
]


class PackedMatrix(Owner):
    """One weight matrix [rows, columns], packed as a kind of ``PACKED``, for products without an
    epilogue."""

    _FREE = "paceline_matrix_destroy"

    def __init__(
        self, weights: Tensor, dtype: str, *, threads: int = 1, isa: str | None = None
    ) -> None:
        self._library = library()
        if isinstance(weights, RawTensor):
            data, kind, columns = weights.data, TYPES[weights.type], weights.columns
        else:
            data, kind = (
                np.ascontiguousarray(weights, dtype=np.float32).view(np.uint8),
                TYPES["F32"],
            )
            columns = weights.shape[1]
        self.shape = (data.shape[0], columns)
        name = None if isa is None else isa.encode()
        self._handle = self._library.paceline_matrix(
            PACKED[dtype], kind, data.ctypes.data, *self.shape, threads, name
        )
        if self._handle is None:
            check(-1)

    def multiply(self, x: NDArray[np.float32], repeat: int = 1) -> NDArray[np.float32]:
        """Return x [M, columns] times the matrix, [M, rows], computed ``repeat`` times."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        out = np.full((len(x), self.shape[0]), np.nan, dtype=np.float32)
        check(
            self._library.paceline_matrix_multiply(
                self.handle, x.ctypes.data, len(x), out.ctypes.data, repeat
            )
        )
        return out

    def unpack(self) -> NDArray[np.float32]:
        """Return the weights as the products see them, [rows, columns]."""
        out = np.empty(self.shape, dtype=np.float32)
        check(self._library.paceline_matrix_unpack(self.handle, out.ctypes.data))
        return out


def products_seconds(matrices: Sequence[PackedMatrix], x: NDArray[np.float32]) -> float:
    """Return the seconds of the products of x [M, columns] with matrices of one shape and dtype,
    one after the other, on the threads of the first one."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    handles = (ctypes.c_void_p * len(matrices))(*(matrix.handle for matrix in matrices))
    seconds: float = library().paceline_products_seconds(
        handles, len(matrices), x.ctypes.data, len(x)
    )
    check(0 if seconds >= 0 else -1)
    return seconds


def peak_rate(dtype: str, threads: int, isa: str | None = None) -> float:
    """Return the multiply-adds per second that ``threads`` threads reach between registers, with
    the instructions that a variant uses for weights of this dtype; 0 where that is not known.

    Args:
        isa: None: the best variant.
    """
    name = None if isa is None else isa.encode()
    rate: float = library().paceline_peak(name, PACKED[dtype], threads)
    check(0 if rate >= 0 else -1)
    return rate


def cache_bytes(model: NativeModel) -> NDArray[np.uint8]:
    """Return the model's whole KV cache, writable, valid until the model is closed."""
    size = ctypes.c_int64()
    address = library().paceline_cache(model.handle, ctypes.byref(size))
    return np.ctypeslib.as_array(
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size.value,)
    )


def attend(
    model: NativeModel,
    qkv: NDArray[np.float32],
    positions: Integers,
    query_start: Integers,
    block_tables: Integers,
) -> NDArray[np.float32]:
    """Rotate, store into layer 0 and attend.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim]; queries, keys and values concatenated.

    Returns:
        [T, heads * head_dim].
    """
    qkv = np.array(qkv, dtype=np.float32, order="C")
    located, starts, tables = (
        np.ascontiguousarray(array, dtype=np.int32)
        for array in (positions, query_start, block_tables)
    )
    heads, kv_heads, head_dim = model.heads
    out = np.full((len(qkv), heads * head_dim), np.nan, dtype=np.float32)
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(f"qkv has shape {qkv.shape} for {model.heads}")
    ids = np.zeros(len(qkv), dtype=np.int32)
    step = Step(
        tokens=len(qkv),
        sequences=len(starts) - 1,
        table_width=tables.shape[1],
        sampled=0,
        token_ids=ids.ctypes.data,
        positions=located.ctypes.data,
        query_start=starts.ctypes.data,
        tables=tables.ctypes.data,
        sample_rows=None,
        logits=None,
    )
    check(
        library().paceline_attention(
            model.handle, ctypes.byref(step), qkv.ctypes.data, out.ctypes.data
        )
    )
    return out


def clock_hz() -> float:
    """Return the cycles per second of this thread's processor, measured in some milliseconds; 0
    on architectures without a known method."""
    return float(library().paceline_clock_hz())


def read_bandwidth(num_bytes: int, threads: int, repeat: int = 5) -> float:
    """Return the best bytes per second that ``threads`` threads read from a buffer of that size."""
    buffer = np.ones(num_bytes, dtype=np.uint8)
    seconds: float = library().paceline_read_seconds(buffer.ctypes.data, num_bytes, threads, repeat)
    return num_bytes / seconds


@dataclass(frozen=True, slots=True)
class Traits:
    """Differences between variants of the kernels besides their speed."""

    # products of bytes share 16 bits, so steps of activations are larger
    narrow_sums: bool
    # activations multiplied with bfloat16 weights stay float32
    float_activations: bool


def traits(isa: str | None = None) -> Traits:
    """Return a variant's traits; None: the best one's. Raises ConfigError if it cannot run here."""
    out = (ctypes.c_int64 * 2)()
    check(library().paceline_traits(None if isa is None else isa.encode(), out))
    return Traits(bool(out[0]), bool(out[1]))


def variants_for(
    leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf71_eax: int, states: int
) -> str:
    """Return ``variants()`` of another processor, joined by commas.

    Args:
        leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax: results of its cpuid.
        states: the register states that its system saves (XCR0).
    """
    words = (ctypes.c_uint32 * 4)(leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax)
    names: bytes = library().paceline_variants_for(words, states)
    return names.decode()
