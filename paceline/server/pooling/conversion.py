"""Vectors to JSON, and how alike they are, on a thread and a slice at a time: two thousand vectors
are millions of numbers, and the event loop has others' tokens to send meanwhile.

A thread holds the interpreter while it writes numbers as text, so what it does in one go takes
about a millisecond, and the loop has its turn between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from paceline.server.bodies.wire import encode
from paceline.server.prompts import slices

__all__ = ["cosines", "encode_list"]

_T = TypeVar("_T")

# numbers of vectors, or as many characters of something else
_SLICE: Final = 1 << 14
# numbers that are multiplied, which take a tenth of the time of writing them
_SLICE_OF_PRODUCTS: Final = 1 << 17


async def encode_list(
    answer: msgspec.Struct, name: str, make: Callable[[int], Any], sizes: Sequence[int]
) -> bytes:
    """``answer`` as JSON with a list in place of the empty one in its field ``name``.

    Args:
        make: item number so much of the list; it is called on another thread.
        sizes: of each item, in numbers or characters.
    """

    def part(start: int, stop: int) -> bytes:
        return encode([make(place) for place in range(start, stop)])[1:-1]

    parts = await _in_slices(part, sizes, _SLICE)
    # in a text of the answer the quotation marks would have backslashes before them
    before, empty, after = encode(answer).partition(f'"{name}":[]'.encode())
    assert empty, f"the answer has no empty list {name}"

    def join() -> bytes:
        return b"".join((before, f'"{name}":['.encode(), b",".join(parts), b"]", after))

    return await _off_the_loop(join, sum(map(len, parts)), _SLICE)


async def cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Of the angle between two vectors, by their places, for each pair; 0 where one is all zero."""
    size = len(vectors[0]) // 4
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def numbers(places: Any) -> Any:
        packed = b"".join(vectors[place] for place in places)
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
    """What ``work`` makes of each slice of the items, from one place to another."""
    return [
        await _off_the_loop(partial(work, start, stop), sum(sizes[start:stop]), most)
        for start, stop in slices(sizes, most)
    ]


async def _off_the_loop(work: Callable[[], _T], size: int, most: int) -> _T:
    """On a thread, unless it is quicker done than handed over."""
    if 8 * size <= most:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
