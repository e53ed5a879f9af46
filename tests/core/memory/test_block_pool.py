"""Blocks: which is handed out next, and which prefixes stay."""

from __future__ import annotations

import random

import pytest

from paceline.core.memory.block_pool import BlockPool


def test_never_hashed_blocks_are_evicted_before_cached_ones() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.register([first[0]], [b"x"])
    pool.release(first)
    assert pool.allocate(3) == [first[1], 2, 3]
    assert pool.lookup(b"x") == first[0]
    assert pool.allocate(1) == [first[0]]
    assert pool.lookup(b"x") is None


def kept(pool: BlockPool, *names: bytes) -> list[int]:
    """One more cached block per name, freed in that order."""
    blocks = pool.allocate(len(names))
    pool.register(blocks, names)
    for block in blocks:
        pool.release([block])
    return blocks


def test_idle_prefixes_beyond_the_limit_make_room_before_memory_is_touched() -> None:
    pool = BlockPool(10, max_idle_blocks=2)
    assert kept(pool, b"a", b"b", b"c") == [0, 1, 2]
    # the oldest one is one too many; what is within the limit stays
    assert pool.allocate(2) == [0, 3]
    assert [pool.lookup(name) for name in (b"a", b"b", b"c")] == [None, 1, 2]
    pool.release([3])
    assert pool.allocate(1) == [3]
    # the pool's end is still within reach
    assert pool.allocate(8) == [4, 5, 6, 7, 8, 9, 1, 2]
    pool.check_integrity(dict.fromkeys(range(10), 1))


def test_without_a_limit_every_prefix_stays_until_the_pool_was_used_once() -> None:
    pool = BlockPool(4)
    kept(pool, b"a", b"b", b"c")
    assert pool.allocate(1) == [3]
    assert pool.num_cached_free == 3
    pool.check_integrity({3: 1})


@pytest.mark.parametrize("limit", [0, 1, 3, None])
def test_memory_ever_used_is_bounded_by_use_and_limit(limit: int | None) -> None:
    pool = BlockPool(200, max_idle_blocks=limit)
    rng = random.Random(7)
    held: list[list[int]] = []
    peak = used = 0
    for number in range(500):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        elif len(held) < 5:
            held.append(pool.allocate(rng.randint(1, 4)))
            pool.register(held[-1], [b"%d.%d" % (number, i) for i in range(len(held[-1]))])
            used = max(used, *held[-1])
        peak = max(peak, sum(map(len, held)))
    assert used < (200 if limit is None else peak + limit)
    assert (used > 100) == (limit is None)
    pool.check_integrity({block: 1 for table in held for block in table})


def test_a_free_cached_block_is_taken_back_with_its_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register([block], [b"x"])
    pool.release([block])
    pool.acquire([block])
    assert pool.ref_count(block) == 1
    assert pool.num_free == 1
    pool.check_integrity({block: 1})


def test_forget_drops_blocks_from_the_cache() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register([block], [b"x"])
    pool.release([block], forget=True)
    assert pool.lookup(b"x") is None


def test_integrity_finds_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 0: 1 references, 0 tables"):
        pool.check_integrity({})
