"""The interface of a place where KV blocks lie by their hash, and a store in memory for tests.

A block's hash stands for all tokens up to its end (``core.memory.kv_cache.hash_block``), so a store
knows no sequences, tokens or requests. What differs in a model's files, its formats or the kernels'
level never meets: the fingerprint (``fingerprint``) is part of what a store is opened for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

__all__ = ["BlockSource", "BlockStore", "Counts", "MemoryStore"]


class Counts:
    """Counters of a store, read from any thread; a number may be a moment old."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0
        # bytes that the store holds now
        self.num_bytes = 0
        # by kind: "checksum", "disk", "busy" (a write was left out as too many waited)
        self.errors: Counter[str] = Counter()
        # why nothing is written any more; "": it is
        self.failure = ""


class BlockSource(Protocol):
    """A place from which blocks are read."""

    def read(self, hashes: Sequence[bytes], left: Callable[[], float]) -> Iterator[bytes]:
        """Yield the content of a run of blocks in pieces of whole blocks, until one is missing or
        not as it was written. Called on a thread of its own; raises OSError where the place cannot
        be reached.

        Args:
            left: seconds that are left; 0 or less: nothing more is wanted, whatever was said
                before. A place that may stand still looks several times a second.
        """


class BlockStore(BlockSource, Protocol):
    """A place in which this engine keeps blocks. All methods may be called from any thread, and
    none but ``read`` raises for errors of the disk."""

    counts: Counts

    def find(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the hashes, from the first on, are here."""

    def write(self, hashes: Sequence[bytes], data: bytes) -> None:
        """Keep blocks that are not here yet, and give the least recently used up for them."""

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks whose content is not to be trusted, for good."""

    def close(self) -> None:
        """Release files and locks. Idempotent."""


class MemoryStore:
    """A ``BlockStore`` without a disk, for tests. ``broken`` hashes read as missing."""

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes
        self.blocks: dict[bytes, bytes] = {}
        self.broken: set[bytes] = set()
        self.counts = Counts()

    def find(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, each in enumerate(hashes) if each not in self.blocks), len(hashes))

    def read(self, hashes: Sequence[bytes], left: Callable[[], float]) -> Iterator[bytes]:
        for each in hashes:
            if each in self.broken or each not in self.blocks:
                return
            self.counts.read_bytes += self._size
            yield self.blocks[each]

    def write(self, hashes: Sequence[bytes], data: bytes) -> None:
        for index, each in enumerate(hashes):
            self.blocks.setdefault(each, data[index * self._size : (index + 1) * self._size])

    def drop(self, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            self.blocks.pop(each, None)

    def close(self) -> None:
        """Do nothing: the blocks are of this process alone."""
