"""Swapped blocks come back when their request is admitted, and blocks of forks are taken back."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.core.config import CacheConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.outputs import BlockSwap
from tests.driving import Driver, make_request

COUNT = 4


def test_what_was_swapped_out_comes_back_in_place_of_being_computed() -> None:
    manager = KVCacheManager(
        CacheConfig(block_size=4, num_blocks=8, num_host_blocks=3, enable_prefix_caching=False)
    )
    request = make_request("a", 10)
    assert manager.admit(request, beside_others=False)
    request.num_computed_tokens = 9
    held = list(request.block_ids)
    manager.host.keep(request)
    manager.free(request)
    out = manager.host.take_swaps()
    assert [swap.src for swap in out] == held and all(swap.to_host for swap in out)
    assert manager.host.num_free == 0 and manager.host.take_swaps() == ()
    assert manager.num_lacking(request) == 1
    assert manager.admit(request, beside_others=False)
    assert request.num_computed_tokens == 9
    back = manager.host.take_swaps()
    assert back == tuple(
        BlockSwap(swap.dst, block, False)
        for swap, block in zip(out, request.block_ids, strict=True)
    )
    assert request.history.num_restored_tokens == 9
    assert manager.host.num_free == 3
    assert (manager.host.num_swapped_out, manager.host.num_swapped_in) == (3, 3)
    manager.check_integrity([request])


def prompt_of(index: int) -> range:
    return range(100 * index, 100 * index + 20)


def crowd(*, num_blocks: int = 100, tail_tokens: int = 40, **options: Any) -> Driver:
    """``COUNT`` requests of 20 tokens and more were swapped out, since others took their places and
    one has nearly all of the memory; now that one goes, and another is about to take its place."""
    settings = {
        "num_blocks": num_blocks,
        "max_num_seqs": COUNT + 1,
        "policy": "priority",
        "num_host_blocks": 60,
        "preemption": "swap",
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }
    driver = Driver(**(settings | options))
    hog = 4 * (num_blocks - 6 * COUNT - 9)
    driver.add(make_request("hog", hog, 100, priority=5))
    for index in range(COUNT):
        driver.add(make_request(f"low{index}", prompt_of(index), 20, priority=9))
    driver.step()
    driver.step()
    # they start one step after another, and end together
    for index in range(COUNT):
        driver.add(make_request(f"high{index}", 22, 14 - index, arrival=driver.now, priority=0))
    while driver.scheduler.stats().num_preemptions < COUNT:
        driver.step()
    driver.add(make_request("tail", 10, tail_tokens, arrival=driver.now, priority=5))
    driver.abort("hog")
    return driver


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_swapped_out_comes_back_once_and_nothing_is_computed_again(depth: int) -> None:
    driver = crowd(depth=depth)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_swapped_in_blocks == stats.num_swapped_out_blocks >= 5 * COUNT
    for plan in driver.plans:
        # a request's blocks are there before the step in which it runs again
        if any(not swap.to_host for swap in plan.swaps):
            assert any(new.request_id.startswith("low") for new in plan.new_requests)
    for index in range(COUNT):
        assert driver.tokens[f"low{index}"] == expected_tokens(prompt_of(index), 20, 997)
    assert stats.num_recomputed_tokens == 0


def held_by_predicted_memory() -> Driver:
    """Two made way for one with whom memory would not last, although there is room for what they
    have so far."""
    driver = Driver(
        policy="priority",
        max_num_seqs=3,
        num_blocks=100,
        future_memory_check=True,
        num_host_blocks=60,
        preemption="swap",
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    for index in range(3):
        prompt = range(100 * index, 100 * index + 40)
        driver.add(make_request(f"low{index}", prompt, 85, priority=1))
    for _ in range(6):
        driver.step()
    driver.add(make_request("urgent", 150, 100, arrival=driver.now, priority=0))
    driver.step()
    return driver


def test_one_that_was_swapped_out_is_let_in_no_sooner_than_memory_lasts() -> None:
    driver = held_by_predicted_memory()
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions, stats.blocked_by) == (2, "memory")
    driver.run()
    # neither made way a second time, for what it was let in too early for
    assert driver.scheduler.stats().num_preemptions == 2


def test_blocks_of_waiting_forks_are_taken_back_when_those_that_run_lack_them() -> None:
    driver = Driver(num_blocks=24, max_num_seqs=2)
    driver.add(make_request("parent", 40, 30))
    for index in range(2):
        driver.add(make_request(f"fork{index}", 40, 30, fork_of="parent"))
    driver.step()
    waiting = driver.scheduler._waiting
    assert any(request.block_ids for request in waiting)
    while any(request.block_ids for request in waiting):
        driver.step()
    driver.run()
    for name in ("parent", "fork0", "fork1"):
        assert len(driver.tokens[name]) == 30
