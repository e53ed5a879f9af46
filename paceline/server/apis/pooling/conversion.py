"""Vectors to JSON, and their similarity, computed on a thread in slices: two thousand vectors are
millions of numbers, and the event loop has to send other callers' tokens meanwhile.

A thread holds the interpreter while it writes numbers as text, so a slice takes about a
millisecond, and the loop runs between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from paceline.server.generation.prompts import slices
from paceline.server.protocol.responses import encode

__all__ = ["cosines", "encode_list"]

_T = TypeVar("_T")

# numbers of vectors per slice, or as many characters of other items
_SLICE: Final = 1 << 14
# numbers that are multiplied per slice, which takes a tenth of the time of writing them
_SLICE_OF_PRODUCTS: Final = 1 << 17


async def encode_list(
    answer: msgspec.Struct, name: str, make: Callable[[int], Any], sizes: Sequence[int]
) -> bytes:
    """Return ``answer`` as JSON with a list in place of the empty one in its field ``name``.

    Args:
        make: makes the list's item of an index; called on another thread.
        sizes: size of each item, in numbers or characters.
    """

    def part(start: int, stop: int) -> bytes:
        return encode([make(place) for place in range(start, stop)])[1:-1]

    parts = await _in_slices(part, sizes, _SLICE)
    # unambiguous: quotation marks inside a text of the answer are escaped
    before, empty, after = encode(answer).partition(f'"{name}":[]'.encode())
    assert empty, f"the answer has no empty list {name}"

    def join() -> bytes:
        return b"".join((before, f'"{name}":['.encode(), b",".join(parts), b"]", after))

    return await _off_the_loop(join, sum(map(len, parts)), _SLICE)


async def cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine similarity of each pair of indices; 0 if one of the vectors is zero."""
    size = len(vectors[0]) // 4
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def numbers(chosen: Any) -> Any:
        packed = b"".join(vectors[place] for place in chosen)
        return np.frombuffer(packed, "<f4").reshape(-1, size).astype(np.float64)

    def part(start: int, stop: int) -> list[float]:
        a, b = numbers(first[start:stop]), numbers(second[start:stop])
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        dots = np.einsum("ij,ij->i", a, b)
        found: list[float] = np.divide(
            dots, lengths, out=np.zeros_like(dots), where=lengths > 0
        ).tolist()
        return found

    parts = await _in_slices(part, [size] * len(pairs), _SLICE_OF_PRODUCTS)
    return [value for part in parts for value in part]


async def _in_slices(work: Callable[[int, int], _T], sizes: Sequence[int], most: int) -> list[_T]:
    """Return the result of ``work(start, stop)`` for each slice of the items."""
    return [
        await _off_the_loop(partial(work, start, stop), sum(sizes[start:stop]), most)
        for start, stop in slices(sizes, most)
    ]


async def _off_the_loop(work: Callable[[], _T], size: int, most: int) -> _T:
    """Run ``work`` on a thread, unless it takes less time than handing it over."""
    if 8 * size <= most:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
