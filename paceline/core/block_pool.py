"""KV blocks: reference counts, the prefix cache's index, and the order of eviction.

A block is free exactly when nobody references it. Free blocks keep their hash, so a later request
with the same prefix can take them back; ``allocate`` evicts from the front of the free queue::

    free queue   [ never hashed ... | least recently freed ... most recently freed ]
                   evicted first                                 evicted last

This module does not know requests, tokens or what the blocks hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """``num_blocks`` blocks with ids 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # ids are keys; an OrderedDict is a linked list with O(1) removal from the middle
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # free blocks that have a hash
        self._num_cached_free = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks, free or not, that the prefix cache can find."""
        return len(self._cached)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that the prefix cache can find."""
        return self._num_cached_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks with reference count 1, evicting what they cached.

        The caller has checked ``num_free``; KeyError otherwise.
        """
        taken = []
        free, hashes, cached, ref_counts = self._free, self._hashes, self._cached, self._ref_counts
        for _ in range(count):
            block_id, _ = free.popitem(last=False)
            # as _forget does, without the call: this runs for every block of every request
            block_hash = hashes[block_id]
            if block_hash is not None:
                del cached[block_hash]
                hashes[block_id] = None
                self._num_cached_free -= 1
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each; a free block leaves the free queue with its content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self._num_cached_free -= self._hashes[block_id] is not None
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], *, forget: bool = False) -> None:
        """Drop a reference of each block of one table, given in table order.

        Blocks nobody else holds become free. The tail is freed first, hence evicted first: a
        prefix stays useful longer than what followed it. ``forget`` also drops them from the
        prefix cache (their content is not to be trusted).
        """
        free, hashes, ref_counts = self._free, self._hashes, self._ref_counts
        for block_id in reversed(block_ids):
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                if forget:
                    self._forget(block_id)
                free[block_id] = None
                if hashes[block_id] is None:
                    free.move_to_end(block_id, last=False)
                else:
                    self._num_cached_free += 1

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, free or in use."""
        return self._cached.get(block_hash)

    def register(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Offer full blocks to the prefix cache. The first block with a content wins; a duplicate
        stays unregistered and is evicted first once free."""
        cached = self._cached
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in cached:
                cached[block_hash] = block_id
                self._hashes[block_id] = block_hash

    def reset_cache(self) -> None:
        """Forget every cached prefix; blocks in use stay in use."""
        self._cached.clear()
        self._hashes = [None] * self.num_blocks
        self._num_cached_free = 0

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None

    def check_integrity(self, expected_refs: Mapping[int, int]) -> None:
        """AssertionError unless every invariant holds.

        ``expected_refs`` counts how many block tables hold each block.
        """
        for block_id, count in enumerate(self._ref_counts):
            expected = expected_refs.get(block_id, 0)
            assert count == expected, f"block {block_id}: {count} references, {expected} tables"
            assert (count == 0) == (block_id in self._free), f"block {block_id}: free list is wrong"
        assert set(expected_refs) <= set(range(self.num_blocks)), "a table holds an unknown block"
        for block_hash, block_id in self._cached.items():
            assert self._hashes[block_id] == block_hash, (
                f"block {block_id}: cached under a wrong hash"
            )
        idle = sum(self._hashes[block_id] is not None for block_id in self._free)
        assert idle == self._num_cached_free, f"{idle} cached free blocks, not as counted"
        hashed = sum(block_hash is not None for block_hash in self._hashes)
        assert hashed == len(self._cached), f"{hashed} hashed blocks, {len(self._cached)} cached"
