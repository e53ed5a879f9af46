"""KV blocks: reference counts, the prefix cache's index, and the order of eviction.

A block is free when no table references it. Free blocks keep their hash, so a later request with
the same prefix can take them back; ``allocate`` takes from the front of the free queue::

    free queue   [ without hash | never used | least recently freed ... most recently freed ]
                   taken first                                            taken last

Memory of a block that was never used may not have been taken from the system yet. So free blocks
beyond the ``max_idle_blocks`` most recently freed are evicted before a never used block is taken:
the blocks ever used exceed those in use at once by at most that number.

This module does not know requests, tokens or what the blocks hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["BlockPool", "Losses", "Pool"]


class Pool(Protocol):
    """Blocks as scheduling sees them: counts, of which it takes some. See ``BlockPool``."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached_free(self) -> int: ...
    def allocate(self, count: int, /) -> list[int]: ...


@dataclass(slots=True)
class Losses:
    """Prefixes that a pool has lost, until their reader, which has copies, clears the lists."""

    # (block, hash) of those whose block was taken; the block holds them until a later plan runs
    evicted: list[tuple[int, bytes]] = field(default_factory=list)
    # hashes of those that are not to be trusted
    forgotten: list[bytes] = field(default_factory=list)


class BlockPool:
    """``num_blocks`` blocks with ids from 0 on. At most ``max_idle_blocks`` free ones keep a prefix
    while others were never used; None: all."""

    def __init__(self, num_blocks: int, max_idle_blocks: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._max_idle = num_blocks if max_idle_blocks is None else max_idle_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # ids from here on were never allocated
        self._num_used = 0
        # blocks that were used, are free and have no hash; the last one freed is taken first
        self._blank: list[int] = []
        # free blocks with a hash, least recently freed first; removal from the middle is O(1)
        self._findable: OrderedDict[int, None] = OrderedDict()
        # public: set by a reader of what is lost; None: there is none
        self.losses: Losses | None = None

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._findable) + self.num_blocks - self._num_used

    @property
    def num_cached_free(self) -> int:
        """Free blocks that the prefix cache can find."""
        return len(self._findable)

    @property
    def max_idle(self) -> int:
        """Free blocks that may keep a prefix while others were never used."""
        return self._max_idle

    def findable(self) -> Iterator[tuple[int, bytes]]:
        """Yield (block, hash) of the free blocks that can be found, most recently freed first."""
        for block_id in reversed(self._findable):
            block_hash = self._hashes[block_id]
            assert block_hash is not None, "a findable block has a hash"
            yield block_id, block_hash

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks no request holds."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def forget(self, block_id: int) -> None:
        """Take a cached block out of the prefix cache."""
        block_hash = self._hashes[block_id]
        assert block_hash is not None, "only what is cached can be forgotten"
        del self._cached[block_hash]
        self._hashes[block_id] = None
        if self._ref_counts[block_id] == 0:
            del self._findable[block_id]
            self._blank.append(block_id)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` <= ``num_free`` blocks with a reference each; evict what they cached."""
        blank, ref_counts = self._blank, self._ref_counts
        first = max(0, len(blank) - count)
        taken = blank[first:][::-1]
        del blank[first:]
        if len(taken) < count:
            excess = len(self._findable) - self._max_idle
            if excess > 0:
                self._evict(min(count - len(taken), excess), taken)
            fresh = range(self._num_used, self.num_blocks)[: count - len(taken)]
            taken += fresh
            self._num_used += len(fresh)
            if len(taken) < count:
                self._evict(count - len(taken), taken)
        for block_id in taken:
            ref_counts[block_id] = 1
        return taken

    def _evict(self, count: int, taken: list[int]) -> None:
        """Move the ``count`` blocks least recently freed to ``taken``."""
        oldest, hashes, cached = self._findable.popitem, self._hashes, self._cached
        for _ in range(count):
            block_id, _ = oldest(last=False)
            block_hash = hashes[block_id]
            assert block_hash is not None, "a findable block has a hash"
            del cached[block_hash]
            hashes[block_id] = None
            taken.append(block_id)
            if self.losses is not None:
                self.losses.evicted.append((block_id, block_hash))

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each; a free block leaves the free queue with its content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                # a block that was found is findable
                del self._findable[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], *, forget: bool = False) -> None:
        """Drop a reference of each block of one table, given in table order. Blocks that no other
        table holds become free. The tail is freed first, hence evicted first: a prefix stays useful
        longer than what followed it. ``forget``: their content is not to be trusted."""
        hashes, ref_counts = self._hashes, self._ref_counts
        for block_id in reversed(block_ids):
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                block_hash = hashes[block_id]
                if forget and block_hash is not None:
                    del self._cached[block_hash]
                    if self.losses is not None:
                        self.losses.forgotten.append(block_hash)
                    block_hash = hashes[block_id] = None
                if block_hash is None:
                    self._blank.append(block_id)
                else:
                    self._findable[block_id] = None

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block with this content, free or in use."""
        return self._cached.get(block_hash)

    def register(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Offer full blocks to the prefix cache. The first block with a content wins; a duplicate
        stays unregistered and is evicted first once free."""
        cached = self._cached
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in cached:
                cached[block_hash] = block_id
                self._hashes[block_id] = block_hash

    def check_integrity(self, expected_refs: Mapping[int, int]) -> None:
        """Raise AssertionError unless all agree; ``expected_refs`` counts the tables of a block."""
        used, counts = self._num_used, self._ref_counts
        # a pool may have many blocks that were never taken
        assert not any(counts[used:]) and not any(self._hashes[used:]), "in use and never taken"
        held = {block_id: count for block_id, count in enumerate(counts[:used]) if count}
        for block_id, _ in held.items() ^ expected_refs.items():
            count, expected = held.get(block_id, 0), expected_refs.get(block_id, 0)
            raise AssertionError(f"block {block_id}: {count} references, {expected} tables")
        free = [block_id for block_id, count in enumerate(counts[:used]) if not count]
        listed = [*self._blank, *self._findable]
        assert sorted(listed) == free, f"free are {free}, and listed are {listed}"
        hashed = [(name, b) for b, name in enumerate(self._hashes[:used]) if name is not None]
        assert sorted(self._cached.items()) == sorted(hashed), "blocks and their index differ"
        findable = {block_id for _, block_id in hashed if not counts[block_id]}
        assert self._findable.keys() == findable, "free blocks with a hash are in the wrong list"
