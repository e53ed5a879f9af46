"""Fetching swapped blocks ahead: for whom, how much in a step, and what is taken back when."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.backends.null import expected_tokens
from paceline.core.memory.pressure import Pressure, PressureValve
from paceline.core.queues.fair_queue import FairQueue
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier
from tests.driving import Driver, make_request

COUNT = 4


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
    assert sum(len(plan.prefetches) for plan in driver.plans) == 0, "there was room before"
    driver.add(make_request("tail", 10, tail_tokens, arrival=driver.now, priority=5))
    driver.abort("hog")
    return driver


def waiting(driver: Driver) -> list[Request]:
    """Who was swapped out, in order."""
    known = driver.scheduler._requests
    return [known[f"low{i}"] for i in range(COUNT)]


def moved(driver: Driver) -> tuple[int, int]:
    """Blocks that came back before a step, and after one."""
    inline = sum(not swap.to_host for plan in driver.plans for swap in plan.swaps)
    return inline, sum(len(plan.prefetches) for plan in driver.plans)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_that_come_back_in_one_step_were_fetched_ahead(depth: int) -> None:
    driver = crowd(depth=depth)
    driver.run()
    out = driver.scheduler.stats().num_swapped_out_blocks
    assert out >= 5 * COUNT
    # each of their blocks once, and none of them on the way of the step that they came back in
    assert moved(driver) == (0, out)
    back = [
        sum(new.request_id.startswith("low") for new in plan.new_requests) for plan in driver.plans
    ]
    assert max(back[2:]) == COUNT, "they did not come back together"
    for index in range(COUNT):
        assert driver.tokens[f"low{index}"] == expected_tokens(prompt_of(index), 20, 997)
    assert driver.scheduler.stats().num_recomputed_tokens == 0


@pytest.mark.parametrize(
    ("max_tokens", "at_once"),
    [(512, [COUNT]), (64, [2, 2]), (16, [1] * COUNT)],
    ids=["all", "two at a time", "each larger than a step"],
)
def test_a_step_is_followed_by_no_more_moves_than_its_tokens(
    max_tokens: int, at_once: list[int]
) -> None:
    driver = crowd()
    # it is the config's; of 21 to 24 tokens each
    driver.scheduler.config = replace(driver.config, max_num_batched_tokens=max_tokens)
    driver.run()
    ahead = [len(plan.prefetches) for plan in driver.plans if plan.prefetches]
    assert ahead == [6 * count for count in at_once]
    assert moved(driver)[0] == 0


@pytest.mark.parametrize("spare", range(4))
def test_each_that_runs_is_left_a_free_block(spare: int) -> None:
    driver = crowd(num_blocks=46 + spare)
    driver.plan()
    fetched = [request for request in waiting(driver) if request.block_ids]
    assert fetched == waiting(driver)[: len(fetched)]
    assert 0 < len(fetched) < COUNT
    free, running = driver.scheduler.stats().num_free_blocks, COUNT + 1
    assert running <= free < running + 8


@pytest.mark.parametrize(("num_tokens", "num_fetched"), [(8, 3), (40, 2), (90, 0)])
def test_whoever_comes_before_them_is_left_what_it_needs(num_tokens: int, num_fetched: int) -> None:
    driver = crowd(num_blocks=60)
    driver.add(make_request("next", num_tokens, 4, arrival=driver.now, priority=6))
    driver.plan()
    assert driver.scheduler.stats().held_by == "slots"
    assert sum(bool(request.block_ids) for request in waiting(driver)) == num_fetched


def test_what_was_taken_back_is_not_fetched_ahead_again() -> None:
    """Those running grow into what was fetched: of that as little is taken back as will do, from
    the end, and it does not go back and forth."""
    driver = crowd(num_blocks=54)
    driver.plan()
    fetched = [request for request in waiting(driver) if request.block_ids]
    assert len(fetched) == COUNT - 1
    while all(request.block_ids for request in fetched):
        driver.settle()
        driver.plan()
    assert [bool(request.block_ids) for request in fetched] == [True, True, False]
    driver.run()
    for index in range(COUNT):
        assert driver.finished[f"high{index}"].num_preemptions == 0
    out, (inline, ahead) = driver.scheduler.stats().num_swapped_out_blocks, moved(driver)
    # the one that was never fetched ahead, and the one that was taken back
    assert ahead <= out and inline <= 12


def test_blocks_are_taken_back_from_the_end_one_request_at_a_time() -> None:
    driver = crowd()
    driver.plan()
    offload = driver.scheduler._waiting.offload
    for left in reversed(range(COUNT)):
        assert offload.drop_blocks()
        assert [bool(r.block_ids) for r in waiting(driver)] == [i < left for i in range(COUNT)]
        driver.scheduler.check_integrity()
    assert not offload.drop_blocks()


def test_one_that_comes_before_them_gets_their_room() -> None:
    """It does not wait for blocks of requests that wait themselves."""
    driver = crowd(num_blocks=64)
    driver.plan()
    driver.settle()
    assert all(request.block_ids for request in waiting(driver))
    free = driver.scheduler.stats().num_free_blocks
    driver.abort("tail")
    driver.add(make_request("urgent", 60, 4, arrival=driver.now, priority=-1))
    assert free < 15
    driver.plan()
    assert driver.scheduler._requests["urgent"].status is RequestStatus.RUNNING
    assert driver.scheduler.stats().num_preemptions == COUNT, "nobody made way"
    # no more was taken back than it lacked
    assert [bool(request.block_ids) for request in waiting(driver)] == [True, True, True, False]
    driver.run()
    assert driver.tokens["urgent"] == expected_tokens(range(1, 61), 4, 997)


def test_what_was_fetched_ahead_is_no_pressure_on_memory() -> None:
    driver = crowd(num_blocks=60)
    driver.scheduler.valve = PressureValve(0.75)
    driver.plan()
    driver.plan()
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks < 0.25 * 60 < stats.num_free_blocks + moved(driver)[1]
    assert driver.scheduler.valve.level is Pressure.CLOSED


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


def test_blocks_are_fetched_ahead_for_those_whom_predicted_memory_holds_up() -> None:
    driver = held_by_predicted_memory()
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions, stats.held_by) == (2, "memory")
    assert moved(driver) == (0, stats.num_swapped_out_blocks)
    driver.run()
    assert moved(driver)[1] == stats.num_swapped_out_blocks > 20


def test_admission_looks_ahead_as_if_nothing_had_been_fetched() -> None:
    driver = held_by_predicted_memory()
    running = driver.scheduler._running.requests
    held = sum(len(request.block_ids) for request in running)
    assert driver.scheduler.kv.pool.num_free < 100 - held
    assert driver.scheduler._admission.outlook(Tier.BACKGROUND)._held == 4 * held


def test_one_whose_blocks_were_fetched_is_let_in_no_sooner_than_memory_lasts() -> None:
    """They count as much as those that it would still have to get."""
    driver = held_by_predicted_memory()
    driver.run()
    # neither made way a second time, for what it was let in too early for
    assert driver.scheduler.stats().num_preemptions == 2


def test_the_first_of_a_queue_are_who_would_be_popped() -> None:
    rng = random.Random(3)
    queue = RequestQueue()
    for index in range(200):
        request = make_request(f"r{index}", 1)
        request.order = (float(rng.randrange(20)), index)
        queue.push(request)
        if index % 3 == 0:
            queue.remove(request)
    first = [request.request_id for request in queue.first(12)]
    queue.check_integrity()
    popped = [queue.pop() for _ in range(12)]
    assert first == [request.request_id for request in popped if request is not None]
    assert RequestQueue().first(3) == []
    assert len(queue.first(1000)) == len(queue)


def test_the_first_of_a_fair_queue_are_the_tenants_in_turn() -> None:
    served = {"a": 5.0, "b": 1.0, "c": 3.0}
    queue = FairQueue(served.__getitem__, lambda request, least: None)
    for index, tenant in enumerate("aaabbc"):
        request = make_request(f"{tenant}{index}", 1, tenant=tenant)
        request.order = (0.0, index)
        queue.push(request)
    assert [request.request_id for request in queue.first(5)] == ["b3", "c5", "a0", "b4", "a1"]
    assert [request.request_id for request in queue.first(2)] == ["b3", "c5"]
    queue.check_integrity()
    assert len(queue) == 6
