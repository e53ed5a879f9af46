"""Block pool, KV cache manager, queue, policies and values, each alone."""

from __future__ import annotations

import math
import random

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.memory.block_pool import BlockPool
from paceline.core.memory.kv_cache import KVCacheManager, blocks_for, fits, hash_block, root_hash
from paceline.core.policies import PolicyContext, make_policy
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.fair_queue import FairQueue
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.sampling_params import SamplingParams
from tests.driving import make_request


def test_blocks_for_and_fits_agree_at_the_edges() -> None:
    for tokens in range(50):
        needed = blocks_for(tokens, 4)
        assert needed == math.ceil(tokens / 4)
        assert fits(tokens, block_size=4, num_blocks=needed)
        assert needed == 0 or not fits(tokens, block_size=4, num_blocks=needed - 1)


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


def test_queue_pops_in_order_and_survives_removals() -> None:
    queue = RequestQueue()
    requests = [make_request(f"r{i}", 1) for i in range(300)]
    for index, request in enumerate(requests):
        request.order = (float((index * 37) % 300), index)
        queue.push(request)
    for request in requests[::2]:
        queue.remove(request)
    queue.check_integrity()
    assert len(queue) == 150
    popped = []
    while (request := queue.pop()) is not None:
        popped.append(request.order)
    assert popped == sorted(r.order for r in requests[1::2])


def test_a_fair_queue_does_not_grow_while_its_head_is_tried_in_vain() -> None:
    served = dict.fromkeys("ab", 0.0)
    queue = FairQueue(served.__getitem__, lambda tenant, least: None)
    for index in range(6):
        request = make_request(f"r{index}", 1, tenant="ab"[index % 2])
        request.order = (float(index), index)
        queue.push(request)
    for _ in range(1000):
        passed = [queue.pop() for _ in range(3)]
        assert [request.request_id for request in passed if request] == ["r0", "r1", "r2"]
        for request in passed:
            assert request is not None
            queue.push(request)
        queue.check_integrity()
    assert len(queue._heap) <= 100
    served["a"] = 5.0
    popped = [request.request_id for _ in range(6) if (request := queue.pop()) is not None]
    assert popped == ["r1", "r3", "r5", "r0", "r2", "r4"]


def test_a_fair_queue_does_not_look_at_all_tenants_when_one_comes_back() -> None:
    """Callers name them, as many as they like."""
    rng = random.Random(2)
    served: dict[str, float] = {}
    lifted: list[float | None] = []
    looks = 0

    def counter(tenant: str) -> float:
        nonlocal looks
        looks += 1
        return served[tenant]

    queue = FairQueue(counter, lambda request, least: lifted.append(least))
    waiting: set[str] = set()
    for index in range(2000):
        tenant = f"t{index}"
        request = make_request(f"r{index}", 1, tenant=tenant)
        request.order = (0.0, index)
        served[tenant] = float(rng.randrange(1000))
        queue.push(request)
        assert lifted[-1] == min((served[name] for name in waiting), default=None)
        waiting.add(tenant)
        # counters of those who wait grow
        served[rng.choice(sorted(waiting)[-20:])] += 5.0
        if index % 4 == 0:
            popped = queue.pop()
            assert popped is not None
            waiting.remove(popped.asked.tenant)
    assert looks < 20 * 2000


def test_unknown_policy_lists_the_known_ones() -> None:
    config = SchedulerConfig(policy="lottery")
    context = PolicyContext(config, WorkEstimator(StepTimeModel(), LengthHistory()))
    with pytest.raises(ConfigError, match="'lottery'; known: boost, deadline, fair, fcfs"):
        make_policy(context)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("min_tokens", 11),
        ("logprobs", 21),
        ("seed", 2**63),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("stop_token_ids", frozenset(range(200))),
    ],
)
def test_sampling_params_refuse_bad_values_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**({"max_tokens": 10} | {field: value}))  # type: ignore[arg-type]
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 0), ("num_blocks", 0), ("watermark", 1.0)]
)
def test_cache_config_refuses_bad_values(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        CacheConfig(**({"block_size": 4, "num_blocks": 4} | {field: value}))  # type: ignore[arg-type]
