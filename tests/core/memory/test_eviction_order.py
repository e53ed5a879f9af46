"""The order of eviction, as docs/understand/scheduling.md tells it: what the pool hands out first,
and what of the prefix cache is lost first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.core.memory.block_pool import BlockPool
from paceline.core.memory.kv_cache import KVCacheManager
from tests.driving import Driver, make_request


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    """A table of full blocks with these hashes, freed at once."""
    table = pool.allocate(len(hashes))
    pool.register(table, hashes)
    pool.release(table)
    return table


def one_by_one(pool: BlockPool) -> Iterator[int]:
    """Blocks in the order in which the pool hands them out."""
    while pool.num_free:
        yield from pool.allocate(1)


def test_blocks_are_handed_out_in_the_order_of_the_document() -> None:
    pool = BlockPool(9, max_idle_blocks=3)
    blank = pool.allocate(2)
    old = cached(pool, b"old head", b"old tail")
    new = cached(pool, b"new head", b"new tail")
    pool.release(blank)
    assert list(one_by_one(pool)) == [
        # never hashed, the last one freed first
        blank[0],
        blank[1],
        # of four idle prefix blocks, the one beyond the limit
        old[1],
        # never used
        6,
        7,
        8,
        # the other prefix blocks: least recently freed first, a table's tail before its head
        old[0],
        new[1],
        new[0],
    ]


def test_without_a_limit_unused_memory_goes_before_every_prefix() -> None:
    pool = BlockPool(5)
    old, new = cached(pool, b"old head", b"old tail"), cached(pool, b"new")
    assert list(one_by_one(pool)) == [3, 4, old[1], old[0], new[0]]


def test_a_prefix_that_was_found_again_counts_as_new() -> None:
    pool = BlockPool(3)
    for name in (b"a", b"b", b"c"):
        cached(pool, name)
    block = pool.lookup(b"a")
    assert block is not None
    pool.acquire([block])
    pool.release([block])
    assert [pool.allocate(1)[0] for _ in range(3)] == [1, 2, 0]
    assert pool.lookup(b"a") is None


def test_one_call_takes_what_single_calls_would() -> None:
    def pool() -> BlockPool:
        made = BlockPool(8, max_idle_blocks=1)
        cached(made, b"a", b"b", b"c")
        made.release(made.allocate(2))
        return made

    assert pool().allocate(8) == list(one_by_one(pool()))


def test_a_duplicate_and_what_is_not_to_be_trusted_are_taken_first() -> None:
    pool = BlockPool(4)
    first, second, third = (pool.allocate(1) for _ in range(3))
    pool.register(first, [b"same"])
    pool.register(second, [b"same"])
    pool.register(third, [b"wrong"])
    pool.release(first)
    pool.release(second)
    pool.release(third, forget=True)
    assert list(one_by_one(pool)) == [third[0], second[0], 3, first[0]]


@pytest.mark.parametrize(("lost", "found"), [(1, 8), (2, 4), (3, 0)])
def test_what_gave_its_blocks_up_finds_its_head_again(lost: int, found: int) -> None:
    """A table is released tail first, so another request takes the end of its tokens."""
    driver = Driver(num_blocks=6, block_size=4)
    kv = driver.scheduler.kv
    assert isinstance(kv, KVCacheManager)
    driver.add(make_request("first", 13, 1))
    driver.run()
    # three full blocks are cached; the fourth was partial, and two were never used
    driver.add(make_request("other", range(500, 500 + 4 * (3 + lost)), 1))
    driver.run()
    again = make_request("again", 13, 1)
    assert 4 * len(kv.starting_blocks(again)) == found
