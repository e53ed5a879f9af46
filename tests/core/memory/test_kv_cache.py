"""Block tables: sizes, hashes, and what is shared."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.config import CacheConfig
from paceline.core.memory.kv_cache import KVCacheManager, blocks_for, hash_block, root_hash
from paceline.core.outputs import BlockCopy
from paceline.core.request import AdapterUse, Request
from tests.driving import ask, make_request


def manager_of(num_blocks: int = 8, **cache: Any) -> KVCacheManager:
    return KVCacheManager(CacheConfig(block_size=4, num_blocks=num_blocks, **cache))


def admitted(manager: KVCacheManager, request: Request, *, computed: int | None = None) -> Request:
    """It has its blocks, and all its tokens (or so many) are computed and offered to the cache."""
    assert manager.admit(request, beside_others=False)
    request.num_computed_tokens = request.num_tokens if computed is None else computed
    manager.cache_computed(request)
    return request


def test_a_block_more_holds_the_first_token_beyond_the_last_block() -> None:
    for tokens in range(50):
        assert blocks_for(tokens, 4) == math.ceil(tokens / 4)


def test_manager_integrity_finds_a_shared_block_that_would_be_written() -> None:
    manager = KVCacheManager(CacheConfig(block_size=4, num_blocks=8))
    one, two = make_request("one", 4), make_request("two", range(50, 54))
    assert manager.admit(one, beside_others=False)
    assert manager.admit(two, beside_others=False)
    manager.check_integrity([one, two])
    manager.pool.release(two.block_ids)
    manager.pool.acquire(one.block_ids)
    two.block_ids = list(one.block_ids)
    with pytest.raises(AssertionError, match="shared tail"):
        manager.check_integrity([one, two])


def test_hashes_depend_on_salt_order_and_everything_before() -> None:
    plain, salted = root_hash(None), root_hash("")
    assert plain != salted
    assert hash_block(plain, [1, 2]) != hash_block(plain, [2, 1])
    assert hash_block(hash_block(plain, [1]), [2]) != hash_block(hash_block(plain, [2]), [2])
    rng = random.Random(1)
    blocks = {tuple(rng.randrange(50_000) for _ in range(4)) for _ in range(20_000)}
    assert len({hash_block(plain, block) for block in blocks}) == len(blocks)


# ---------------------------------------------------------------- admission


def test_admit_takes_all_blocks_of_a_prompt_or_none() -> None:
    manager = manager_of(3)
    large = make_request("large", 13)
    assert manager.shortfall(large, beside_others=True) == 1
    assert not manager.admit(large, beside_others=True)
    assert not large.block_ids and manager.pool.num_free == 3
    small = make_request("small", 9)
    assert manager.shortfall(small, beside_others=True) == 0
    assert manager.admit(small, beside_others=True) and len(small.block_ids) == 3
    assert manager.num_queried_tokens == 9 and manager.num_hit_tokens == 0


def test_the_watermark_is_kept_free_beside_others_alone() -> None:
    manager = manager_of(10, watermark=0.3)
    request = make_request("a", 30)
    assert manager.shortfall(request, beside_others=True) == 1
    assert manager.shortfall(request, beside_others=False) == 0


def test_a_cached_prefix_is_shared_but_for_the_last_token() -> None:
    manager = manager_of()
    first = admitted(manager, make_request("first", 8))
    second = make_request("second", 8)
    # both blocks are cached; the logits of the last token are needed
    assert manager.num_found(second) == 4 and manager.num_lacking(second) == 4
    assert manager.num_in_use(second) == 1
    assert manager.num_in_use(second, without=[first]) == 0
    assert manager.admit(second, beside_others=True)
    assert second.block_ids[0] == first.block_ids[0] != second.block_ids[1]
    assert second.num_computed_tokens == second.num_cached_tokens == manager.num_hit_tokens == 4
    manager.check_integrity([first, second])


@pytest.mark.parametrize("change", [{"cache_salt": "other"}, {"prompt": [2, 1, 3, 4, 5, 6]}])
def test_nothing_is_shared_under_another_salt_or_of_another_prompt(change: dict[str, Any]) -> None:
    manager = manager_of()
    admitted(manager, make_request("first", 6))
    other = make_request("other", **{"prompt": 6, **change})
    assert manager.num_found(other) == 0


def test_prefixes_are_shared_only_under_the_same_salt_and_adapter() -> None:
    def use(contents: int, slot: int = 0) -> AdapterUse:
        return AdapterUse(bytes([contents]) * 32, slot, 1.0, 1, 1)

    # a salt that is an adapter's key, or begins like one, is another root
    salts = (None, "", "a", "\x02" + "\x07" * 32, "\x07" * 32)
    roots = {root_hash(salt, each) for salt in salts for each in (None, use(7), use(8))}
    assert len(roots) == 15
    manager = manager_of()
    admitted(manager, ask(make_request("first", 6), adapter=use(7)))
    # loaded again, the same contents have another slot
    for other, found in ((use(7), 4), (use(7, slot=3), 4), (use(8), 0), (None, 0)):
        assert manager.num_found(ask(make_request("other", 6), adapter=other)) == found


def test_blocks_of_an_ended_request_are_found_until_they_are_needed() -> None:
    for forget, found in ((False, 4), (True, 0)):
        manager = manager_of(2)
        first = admitted(manager, make_request("first", 6))
        manager.free(first, forget=forget)
        assert not first.block_ids and first.num_computed_tokens == 0
        again = make_request("again", 6)
        assert manager.num_found(again) == found
        # an idle block counts as free until it is taken, and as one to be had
        assert manager.shortfall(again, beside_others=False) == 0
        admitted(manager, make_request("other", range(50, 57)))
        assert manager.num_found(again) == 0
        assert manager.shortfall(again, beside_others=False) == 2


def test_an_idle_cached_block_is_one_of_the_free_ones() -> None:
    manager = manager_of(2)
    first = admitted(manager, make_request("first", 6))
    manager.free(first)
    admitted(manager, make_request("other", [50]))
    again = make_request("again", 6)
    assert manager.num_found(again) == 4 and manager.pool.num_free == 1
    assert manager.shortfall(again, beside_others=False) == 1, "to take it leaves none"


def test_without_caching_nothing_is_hashed_or_found() -> None:
    manager = manager_of(enable_prefix_caching=False)
    first = make_request("first", 8)
    manager.num_found(first)
    admitted(manager, first)
    assert not first.block_hashes and manager.num_found(make_request("second", 8)) == 0
    assert manager.num_queried_tokens == 0


def test_a_prompt_is_hashed_once_and_its_output_behind_it() -> None:
    manager = manager_of()
    request = make_request("a", 8)
    manager.num_found(request)
    assert len(request.block_hashes) == 1, "the block of the last token is not looked up"
    admitted(manager, request)
    request.output_token_ids += [9, 10, 11, 12]
    request.num_tokens = request.num_computed_tokens = 12
    assert manager.extend(request, 0) is not None
    manager.pool.check_integrity(dict.fromkeys(request.block_ids, 1))
    request.block_ids += manager.pool.allocate(1)
    manager.cache_computed(request)
    assert request.num_hashed_blocks == 3
    assert request.block_hashes[2] == hash_block(request.block_hashes[1], [9, 10, 11, 12])
    longer = make_request("b", [*range(1, 9), 9, 10, 11, 12, 13])
    assert manager.num_found(longer) == 12


# ---------------------------------------------------------------- rows and copies


def test_extend_takes_the_blocks_a_row_lacks_or_changes_nothing() -> None:
    manager = manager_of(3)
    request = admitted(manager, make_request("a", 7))
    one, three = manager.extend(request, 1), manager.extend(request, 2)
    assert one is not None and one.new_block_ids == ()
    assert three is not None and three.new_block_ids == (request.block_ids[2],)
    assert manager.extend(request, 6) is None
    assert len(request.block_ids) == 3


def test_the_last_token_of_an_output_is_never_stored() -> None:
    manager = manager_of()
    request = admitted(manager, make_request("a", 9, 8))
    for pending, missing in ((0, 0), (4, 1), (7, 1), (8, 1)):
        request.num_pending_tokens = pending
        assert manager.num_missing(request) == missing


def test_the_first_fork_to_write_copies_the_tail_and_the_last_writes_in_place() -> None:
    manager = manager_of()
    parent = admitted(manager, make_request("p", 6), computed=6)
    child = make_request("c", 6, fork_of="p")
    manager.fork(parent, child)
    assert child.block_ids == parent.block_ids and child.num_computed_tokens == 5
    manager.check_integrity([parent, child])
    source = parent.block_ids[1]
    extension = manager.extend(child, 1)
    assert extension is not None
    assert extension.copy == BlockCopy("c", 1, source, child.block_ids[1])
    assert child.block_ids[1] != source == parent.block_ids[1]
    last = manager.extend(parent, 1)
    assert last is not None and last.copy is None, "nobody else has it any more"
    assert not parent.shares_tail and not child.shares_tail
    manager.check_integrity([parent, child])


def test_a_copy_needs_a_free_block() -> None:
    manager = manager_of(2)
    parent = admitted(manager, make_request("p", 6), computed=6)
    child = make_request("c", 6, fork_of="p")
    manager.fork(parent, child)
    assert manager.shortfall(child, beside_others=False) == 1
    assert manager.extend(child, 1) is None
    assert child.shares_tail and child.block_ids == parent.block_ids


def test_a_prompt_computed_elsewhere_lands_in_the_cache_as_far_as_there_is_room() -> None:
    for num_blocks, found in ((8, 8), (1, 4)):
        manager = manager_of(num_blocks)
        request = make_request("a", 10)
        manager.num_found(request)
        manager.land_prefix(request)
        assert manager.num_found(request) == found
        assert manager.pool.num_free == num_blocks, "nobody holds them"
        manager.check_integrity([])


# ---------------------------------------------------------------- integrity


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: setattr(r, "num_computed_tokens", 40), "40 computed tokens in 2 blocks of 4"),
        (lambda r: r.block_ids.append(r.block_ids[0]), "a block twice in its table"),
        (lambda r: setattr(r, "num_swapped_tokens", 3), "3 swapped tokens in"),
        (lambda r: r.block_ids.pop(), "1 references, 0 tables"),
    ],
)
def test_integrity_finds_tables_that_do_not_agree(
    spoil: Callable[[Request], object], message: str
) -> None:
    manager = manager_of()
    request = admitted(manager, make_request("a", 6), computed=3)
    manager.check_integrity([request])
    spoil(request)
    with pytest.raises(AssertionError, match=message):
        manager.check_integrity([request])
