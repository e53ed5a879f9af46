"""What a pool says of blocks that leave it, and how blocks from outside enter it."""

from __future__ import annotations

from paceline.core.config import CacheConfig
from paceline.core.memory.block_pool import Losses
from paceline.core.memory.kv_cache import KVCacheManager, hash_prefix
from tests.driving import make_request


def manager(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(CacheConfig(block_size=4, num_blocks=num_blocks))


def test_the_hashes_of_a_prompt_are_those_that_admission_looks_for() -> None:
    for length in (1, 4, 5, 8, 9, 30):
        request = make_request("a", length)
        request.asked.prompt_token_ids[:] = range(length)
        kv = manager()
        kv.num_found(request)
        salt = request.asked.cache_salt
        assert hash_prefix(range(length), 4, salt) == request.block_hashes
        assert hash_prefix(range(length), 4, "salt")[:1] != request.block_hashes[:1] or length < 5


def test_what_lands_is_found_by_the_next_admission() -> None:
    kv, request = manager(), make_request("a", list(range(17)))
    hashes = hash_prefix(range(17), 4)
    assert len(kv.land(hashes[:2], 0)) == 2
    assert kv.num_found(request) == 8
    assert len(kv.land(hashes, 2)) == 2
    assert kv.num_found(request) == 16
    kv.check_integrity([])
    assert kv.admit(request, beside_others=False) and request.num_computed_tokens == 16
    kv.check_integrity([request])


def test_a_rest_without_its_beginning_does_not_land() -> None:
    kv = manager()
    assert kv.land(hash_prefix(range(17), 4), 2) == []
    assert kv.pool.num_cached_free == 0


def test_no_more_lands_than_is_free() -> None:
    kv, request = manager(6), make_request("a", list(range(100, 112)))
    assert kv.admit(request, beside_others=False)
    assert len(kv.land(hash_prefix(range(33), 4), 0)) == 3
    kv.check_integrity([request])


def test_losses_are_told_once_there_is_a_reader() -> None:
    kv = manager(4)
    kv.land(hash_prefix(range(17), 4), 0)
    losses = kv.pool.losses = Losses()
    found = dict(kv.pool.findable())
    assert [found[block_id] for block_id in found] == hash_prefix(range(17), 4)
    taken = kv.pool.allocate(2)
    assert losses.evicted == [(b, found[b]) for b in taken]
    assert [name for _, name in losses.evicted] == hash_prefix(range(17), 4)[:1:-1], "the end first"
    kv.pool.register(taken, [b"x" * 32, b"y" * 32])
    kv.pool.release(taken, forget=True)
    assert losses.forgotten == [b"y" * 32, b"x" * 32]
