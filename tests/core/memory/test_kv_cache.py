"""Block tables: sizes, hashes, and what is shared."""

from __future__ import annotations

import math
import random

import pytest

from paceline.core.config import CacheConfig
from paceline.core.memory.kv_cache import KVCacheManager, blocks_for, fits, hash_block, root_hash
from tests.driving import make_request


def test_blocks_for_and_fits_agree_at_the_edges() -> None:
    for tokens in range(50):
        needed = blocks_for(tokens, 4)
        assert needed == math.ceil(tokens / 4)
        assert fits(tokens, block_size=4, num_blocks=needed)
        assert needed == 0 or not fits(tokens, block_size=4, num_blocks=needed - 1)


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
