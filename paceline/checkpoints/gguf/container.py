"""The GGUF container: header, metadata and tensor table, checked before anything trusts them.

::

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string, type u32, value                          (count times)
    tensors:   name string, rank u32, dims u64 each, type u32, offset u64
    padding to general.alignment, then tensor data; offsets count from here

Every count, length, offset and size is compared with the file's size before it is used, so that a
malformed file is refused without much memory or time. Only the header is read; tensor data
stays on disk. The meaning of keys is in ``checkpoint.py``.

Source: the format description in ggml's ``docs/gguf.md``. The reader is our own because that of the
``gguf`` package builds several objects per vocabulary entry, which takes seconds for 50,000
entries. Nothing here needs numpy: the API process reads headers too, and would take 20 MB more.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from paceline.errors import CheckpointError

__all__ = ["SIZES", "GGUFFile", "GGUFTensor", "GGUFType", "read_gguf"]


class GGUFType(IntEnum):
    """Types of tensors, equal to the ``gguf`` package's, as a test checks. That package is imported
    only to compute values of types that nothing here reads: it brings writers, tokenizers and
    tables of every architecture, some 20 MB for each process that imports it.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# (values of a block, its bytes)
SIZES: Final[Mapping[GGUFType, tuple[int, int]]] = MappingProxyType(
    {
        GGUFType.F32: (1, 4),
        GGUFType.F16: (1, 2),
        GGUFType.Q4_0: (32, 18),
        GGUFType.Q4_1: (32, 20),
        GGUFType.Q5_0: (32, 22),
        GGUFType.Q5_1: (32, 24),
        GGUFType.Q8_0: (32, 34),
        GGUFType.Q8_1: (32, 40),
        GGUFType.Q2_K: (256, 84),
        GGUFType.Q3_K: (256, 110),
        GGUFType.Q4_K: (256, 144),
        GGUFType.Q5_K: (256, 176),
        GGUFType.Q6_K: (256, 210),
        GGUFType.Q8_K: (256, 292),
        GGUFType.IQ2_XXS: (256, 66),
        GGUFType.IQ2_XS: (256, 74),
        GGUFType.IQ3_XXS: (256, 98),
        GGUFType.IQ1_S: (256, 50),
        GGUFType.IQ4_NL: (32, 18),
        GGUFType.IQ3_S: (256, 110),
        GGUFType.IQ2_S: (256, 82),
        GGUFType.IQ4_XS: (256, 136),
        GGUFType.I8: (1, 1),
        GGUFType.I16: (1, 2),
        GGUFType.I32: (1, 4),
        GGUFType.I64: (1, 8),
        GGUFType.F64: (1, 8),
        GGUFType.IQ1_M: (256, 56),
        GGUFType.BF16: (1, 2),
        GGUFType.TQ1_0: (256, 54),
        GGUFType.TQ2_0: (256, 66),
        GGUFType.MXFP4: (32, 17),
        GGUFType.NVFP4: (64, 36),
        GGUFType.Q1_0: (128, 18),
    }
)


MAX_METADATA: Final = 65_536
MAX_TENSORS: Final = 100_000
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 64
MAX_STRING_BYTES: Final = 1 << 24
# most bytes before the tensor data; the largest vocabularies take some 20 MB
MAX_HEADER_BYTES: Final = 1 << 28
# most strings and nested arrays of one file, each of which costs a Python object; the largest
# vocabularies have less than a million entries and merges
MAX_OBJECTS: Final = 1 << 21
MAX_ARRAY_DEPTH: Final = 4
MAX_RANK: Final = 4
MAX_ALIGNMENT: Final = 65_536
DEFAULT_ALIGNMENT: Final = 32

_STRING: Final = 8
_ARRAY: Final = 9
# metadata type -> struct code and code of arrays, which have no bool
_SCALARS: Final[dict[int, tuple[str, str]]] = {
    0: ("<B", "B"),
    1: ("<b", "b"),
    2: ("<H", "H"),
    3: ("<h", "h"),
    4: ("<I", "I"),
    5: ("<i", "i"),
    6: ("<f", "f"),
    7: ("<?", "B"),
    10: ("<Q", "Q"),
    11: ("<q", "q"),
    12: ("<d", "d"),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table; its bytes are known to lie inside the file."""

    name: str
    # slowest dimension first, as numpy and Hugging Face have it (GGUF stores the reverse)
    shape: tuple[int, ...]
    type: GGUFType
    # first byte, counted from the start of the file
    start: int
    num_bytes: int
    # index of the file that holds it, in a split model (``shards``)
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of ``shape[-1]`` elements."""
        block, size = SIZES[self.type]
        return self.shape[-1] // block * size


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header. Numeric arrays are ``array.array``, string arrays lists of str."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Header:
    """A cursor over the mapped file; every step forward is checked against the file's size."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        # bound on the header's end
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.path = path
        self.pos = 0
        self.num_objects = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, num_bytes: int, what: str) -> int:
        """Reserve ``num_bytes`` and return their start."""
        start = self.pos
        if num_bytes > self.end - start:
            raise self.fail(
                f"truncated or lying: {what} needs {num_bytes} bytes at {start}, the file has "
                f"{self.size} and a header at most {MAX_HEADER_BYTES}"
            )
        self.pos = start + num_bytes
        return start

    def unpack(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.data, self.need(struct.calcsize(code), what))[0]

    def count_objects(self, more: int, what: str) -> None:
        self.num_objects += more
        if self.num_objects > MAX_OBJECTS:
            raise self.fail(f"{what}: more than {MAX_OBJECTS} strings and nested arrays")

    def string(self, what: str, limit: int, *, lenient: bool = False) -> str:
        length = self.unpack("<Q", what)
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        start = self.need(length, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode("utf-8", "replace" if lenient else "strict")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind][0], what)
        if kind == _STRING:
            return self.string(what, MAX_STRING_BYTES, lenient=True)
        if kind == _ARRAY:
            return self.array(what, depth + 1)
        raise self.fail(f"{what} has unknown metadata type {kind}")

    def array(self, what: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"{what}: arrays nested deeper than {MAX_ARRAY_DEPTH}")
        kind = self.unpack("<I", what)
        count = self.unpack("<Q", what)
        # smallest size of count elements: a wrong count is refused before memory is allocated
        if kind in _SCALARS:
            numbers = array(_SCALARS[kind][1])
            start = self.need(count * numbers.itemsize, f"{what}, an array of {count},")
            numbers.frombytes(self.data[start : self.pos])
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers
        if kind not in (_STRING, _ARRAY):
            raise self.fail(f"{what} is an array of unknown metadata type {kind}")
        least = count * (8 if kind == _STRING else 12)
        if least > self.end - self.pos:
            raise self.fail(
                f"{what} claims {count} elements, which need at least {least} bytes; "
                f"{self.end - self.pos} remain"
            )
        self.count_objects(count, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.strings(count, what)

    def strings(self, count: int, what: str) -> list[str]:
        # a vocabulary has 10^5 strings: this loop is most of the time of opening a file
        data, pos, size = self.data, self.pos, self.end
        unpack_length = struct.Struct("<Q").unpack_from
        result: list[str] = []
        append = result.append
        for index in range(count):
            start = pos + 8
            if start > size:
                raise self.fail(f"truncated: {what}[{index}] starts at {pos} of {size} bytes")
            pos = start + unpack_length(data, pos)[0]
            if pos > size:
                raise self.fail(
                    f"truncated or lying: {what}[{index}] claims {pos - start} bytes at {start}, "
                    f"the file has {size}"
                )
            try:
                append(data[start:pos].decode())
            except UnicodeDecodeError as error:
                raise self.fail(f"{what}[{index}] is not UTF-8: {error}") from None
        self.pos = pos
        return result


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of ``path``.

    Raises:
        CheckpointError: not a GGUF file, truncated, or with counts, lengths, types, offsets or
            sizes that contradict one another or the file's size.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError(f"{path}: {size} bytes is too small for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Header(data, path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _parse(header: _Header) -> GGUFFile:
    magic = header.data[header.need(4, "magic") : header.pos]
    if magic != b"GGUF":
        raise header.fail(f"not a GGUF file: it starts with {magic!r}")
    version = header.unpack("<I", "version")
    if version & 0xFFFF == 0:
        raise header.fail(f"GGUF version {version:#010x}: big-endian files are not supported")
    if version not in (2, 3):
        raise header.fail(f"GGUF version {version}; versions 2 and 3 are supported")
    num_tensors = header.unpack("<Q", "tensor count")
    num_metadata = header.unpack("<Q", "metadata count")
    if num_tensors > MAX_TENSORS:
        raise header.fail(f"claims {num_tensors} tensors, at most {MAX_TENSORS} are allowed")
    if num_metadata > MAX_METADATA:
        raise header.fail(
            f"claims {num_metadata} metadata entries, at most {MAX_METADATA} are allowed"
        )

    metadata: dict[str, Any] = {}
    for index in range(num_metadata):
        key = header.string(f"key of metadata entry {index}", MAX_KEY_BYTES)
        if not key:
            raise header.fail(f"metadata entry {index} has an empty key")
        if key in metadata:
            raise header.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = header.value(header.unpack("<I", f"type of {key}"), key)

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise header.fail(
            f"general.alignment is {alignment!r}, not a power of two from 8 to {MAX_ALIGNMENT}"
        )

    entries = [_tensor_entry(header, index) for index in range(num_tensors)]
    data_start = -(-header.pos // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise header.fail(f"tensor {name!r} occurs twice")
        tensors[name] = _locate(header, name, shape, kind, offset, alignment, data_start)
    _check_overlaps(header, tensors)
    return GGUFFile(header.path, version, metadata, tensors)


def _tensor_entry(header: _Header, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return (name, shape slowest first, type number, offset) as written; only rank is checked."""
    name = header.string(f"name of tensor {index}", MAX_NAME_BYTES)
    if not name:
        raise header.fail(f"tensor {index} has an empty name")
    rank = header.unpack("<I", f"rank of {name}")
    if not 1 <= rank <= MAX_RANK:
        raise header.fail(f"tensor {name!r} has rank {rank}, 1 to {MAX_RANK} are allowed")
    dims = [header.unpack("<Q", f"dimensions of {name}") for _ in range(rank)]
    return name, tuple(reversed(dims)), header.unpack("<I", name), header.unpack("<Q", name)


def _locate(
    header: _Header,
    name: str,
    shape: tuple[int, ...],
    kind_number: int,
    offset: int,
    alignment: int,
    data_start: int,
) -> GGUFTensor:
    try:
        kind = GGUFType(kind_number)
    except ValueError:
        raise header.fail(f"tensor {name!r} has unknown type {kind_number}") from None
    block, block_bytes = SIZES[kind]
    elements = 1
    for dim in shape:
        elements *= dim
    if elements == 0:
        raise header.fail(f"tensor {name!r} has an empty dimension: {list(shape)}")
    if elements >= 1 << 62:
        raise header.fail(f"tensor {name!r}: dimensions {list(shape)} overflow")
    if shape[-1] % block:
        raise header.fail(
            f"tensor {name!r}: rows of {shape[-1]} elements do not divide into {kind.name} "
            f"blocks of {block}"
        )
    num_bytes = elements // block * block_bytes
    if offset % alignment:
        raise header.fail(
            f"tensor {name!r} starts at offset {offset}, "
            f"not a multiple of the alignment {alignment}"
        )
    start = data_start + offset
    if start + num_bytes > header.size:
        raise header.fail(
            f"tensor {name!r} needs bytes {start} to {start + num_bytes} "
            f"({kind.name} {list(shape)}), the file has {header.size}"
        )
    return GGUFTensor(name, shape, kind, start, num_bytes)


def _check_overlaps(header: _Header, tensors: dict[str, GGUFTensor]) -> None:
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if previous is not None and tensor.start < previous.start + previous.num_bytes:
            raise header.fail(
                f"tensors {previous.name!r} and {tensor.name!r} overlap: the first ends at byte "
                f"{previous.start + previous.num_bytes}, the second starts at {tensor.start}"
            )
        previous = tensor
