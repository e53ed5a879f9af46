"""Preemption that keeps what was computed: victims, swapping."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.queues.running import RunningList
from paceline.core.queues.waiting import WaitingQueues
from paceline.core.request import Request
from paceline.core.slo import Slo
from tests.driving import Driver, make_request


def pressed(num_requests: int = 10, **options: Any) -> Driver:
    """Requests that together need three times the memory there is; all must come out right."""
    driver = Driver(**({"num_blocks": 30, "max_num_seqs": 10} | options))
    prompts = {f"r{i}": list(range(20 * i + 1, 20 * i + 13)) for i in range(num_requests)}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 24, arrival=driver.now))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == expected_tokens(prompt, 24, 997)
    return driver


@pytest.mark.parametrize("depth", [1, 2])
def test_swapping_loses_no_token_and_computes_none_twice(depth: int) -> None:
    driver = pressed(num_host_blocks=100, preemption="swap", depth=depth)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens == 0
    assert stats.num_swapped_out_blocks > 0
    restored = [update.timeline for update in driver.finished.values() if update.timeline]
    assert sum(timeline.num_swapped_tokens for timeline in restored) > 0


def test_recompute_mode_never_swaps() -> None:
    stats = pressed(
        num_host_blocks=100, preemption="recompute", enable_prefix_caching=False
    ).scheduler.stats()
    assert stats.num_swapped_out_blocks == 0
    assert stats.num_recomputed_tokens > 0


def test_host_memory_that_is_full_means_recompute() -> None:
    stats = pressed(
        num_host_blocks=4, preemption="swap", enable_prefix_caching=False
    ).scheduler.stats()
    assert stats.num_swapped_out_blocks > 0
    assert stats.num_recomputed_tokens > 0


@pytest.mark.parametrize(("swap_block_seconds", "swaps"), [(0.0001, True), (1.0, False)])
def test_auto_does_what_takes_less_time(swap_block_seconds: float, swaps: bool) -> None:
    """0.1 s a token: computing a block of 4 again takes 0.4 s, moving it twice 0.2 ms or 2 s."""
    driver = pressed(
        num_host_blocks=100,
        swap_block_seconds=swap_block_seconds,
        seconds=lambda shape: 0.01 + 0.1 * (shape.wide_tokens + shape.narrow_rows),
    )
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert bool(stats.num_swapped_out_blocks) is swaps


def test_partial_release_loses_only_the_tail_that_was_needed() -> None:
    """A victim's blocks stay findable until others take them, last ones first."""
    driver = Driver(num_blocks=20, max_num_seqs=2)
    # 10 blocks each when they are half done
    driver.add(make_request("a", range(1, 33), 16), make_request("b", range(100, 132), 16))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions >= 1
    lost = stats.num_recomputed_tokens / stats.num_preemptions
    assert lost <= 12, "of more than 36 tokens that the victim had computed"


def test_the_first_in_order_is_never_the_victim() -> None:
    driver = pressed(num_host_blocks=0)
    timeline = driver.finished["r0"].timeline
    assert timeline is not None and timeline.num_preemptions == 0


def test_best_effort_gives_way_first() -> None:
    driver = Driver(num_blocks=20, max_num_seqs=3)
    driver.add(make_request("batch", range(1, 17), 20, slo=Slo(best_effort=True)))
    driver.add(make_request("a", range(100, 116), 20), make_request("b", range(200, 216), 20))
    driver.run()
    preempted = {name: update.num_preemptions for name, update in driver.finished.items()}
    # 36 tokens each: the other two fit into 20 blocks of 4
    assert preempted == {"batch": 1, "a": 0, "b": 0}


def test_who_loses_the_least_work_gives_way() -> None:
    """Not the one that came last, which has the most to compute again."""
    # full when the first, which never gives way, needs a block before the others do
    driver = Driver(num_blocks=33, max_num_seqs=3, enable_prefix_caching=False)
    small, large = make_request("small", range(100, 112), 20), make_request("large", 60, 20)
    driver.add(make_request("first", range(1, 39), 20), small, large)
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    assert (small.num_preemptions, large.num_preemptions) == (1, 0)
    driver.run()


def chooser(*, seconds_per_token: float, swap_block_seconds: float) -> RunningList:
    """Blocks of 4 tokens; what a prompt takes is its tokens' time and nothing else."""
    step_time = StepTimeModel()
    cache = CacheConfig(
        block_size=4, num_blocks=400, num_host_blocks=400, swap_block_seconds=swap_block_seconds
    )
    for index in range(100):
        shape = StepShape().plus(0, 8 + index)
        step_time.observe(shape, seconds_per_token * shape.wide_tokens)
    kv = KVCacheManager(cache)
    waiting = WaitingQueues(RequestQueue, kv, newest_first=False)
    work = WorkEstimator(step_time, LengthHistory())
    return RunningList(SchedulerConfig(), cache, kv, waiting, work)


def computed(num_tokens: int, num_preemptions: int = 0) -> Request:
    request = make_request("r", num_tokens + 1)
    request.num_computed_tokens, request.num_preemptions = num_tokens, num_preemptions
    return request


def test_what_a_victim_loses_is_the_cheaper_of_both_ways_and_more_each_time() -> None:
    # 1 ms a token, 2 ms a block both ways: half of what computing takes
    swapping = chooser(seconds_per_token=1e-3, swap_block_seconds=1e-3)
    assert swapping.seconds_lost(computed(80)) == pytest.approx(0.040, rel=0.02)
    dear = chooser(seconds_per_token=1e-3, swap_block_seconds=1e-2)
    assert dear.seconds_lost(computed(80)) == pytest.approx(0.080, rel=0.02)
    assert dear.seconds_lost(computed(80, 2)) == pytest.approx(0.240, rel=0.02)
    # so nobody is the victim time and again for having a little less
    again, other = computed(60, 1), computed(80)
    assert dear.victim([computed(9), again, other], lambda those: those) is other


@pytest.mark.parametrize(("share", "swaps"), [(0.7, True), (0.9, False), (1.1, False)])
def test_moving_has_to_be_clearly_cheaper_than_computing(share: float, swaps: bool) -> None:
    """Both are predictions: what is nearly equal does not go one way now and the other way next."""
    running = chooser(seconds_per_token=1e-3, swap_block_seconds=share * 2e-3)
    victim = computed(80)
    running.start(victim)
    running.preempt(victim, 0.0)
    assert victim.num_swapped_tokens == (80 if swaps else 0)


def test_an_aborted_request_gives_its_host_memory_back() -> None:
    driver = Driver(
        num_blocks=100, max_num_seqs=1, policy="priority", num_host_blocks=50, preemption="swap"
    )
    driver.add(make_request("low", range(1, 21), 12, priority=9))
    driver.step()
    driver.add(make_request("high", range(80, 90), 6, arrival=driver.now))
    driver.step()
    assert driver.scheduler.kv.host.num_free < 50
    driver.abort("low")
    assert driver.scheduler.kv.host.num_free == 50
    driver.run()


def wasted_and_tokens(**options: Any) -> tuple[int, dict[str, list[int]]]:
    """Tokens computed twice, and all outputs, at about 30 % of the memory needed."""
    driver = Driver(
        num_blocks=options.pop("num_blocks", 60),
        max_num_seqs=16,
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
        seconds=lambda shape: 0.01 + 1e-3 * shape.wide_tokens + 1e-3 * shape.narrow_rows,
        **options,
    )
    for index in range(48):
        prompt = range(30 * index, 30 * index + 10 + index % 15)
        driver.add(make_request(f"r{index}", prompt, 20 + index % 30, arrival=0.01 * index))
    driver.run()
    return driver.scheduler.stats().num_recomputed_tokens, dict(driver.tokens)


def test_pressure_changes_no_token_and_little_is_computed_twice() -> None:
    roomy, expected = wasted_and_tokens(num_blocks=2000)
    newest_first, tokens = wasted_and_tokens(preemption="recompute")
    looking_ahead, same = wasted_and_tokens(
        future_memory_check=True, num_host_blocks=60, swap_block_seconds=1e-4
    )
    assert roomy == 0
    assert expected == tokens == same
    assert newest_first > 100
    assert 2 * looking_ahead <= newest_first


def test_nobody_gives_blocks_up_for_one_that_comes_after_it() -> None:
    """Six blocks. Late by what it was promised, but first in order, ``a`` has no row in the third
    step: it waits for its last token. ``b`` needs a block then."""
    driver = Driver(num_blocks=6, depth=2, policy="fcfs", enable_prefix_caching=False)
    promised = Slo(slo_class="batch", best_effort=True, deadline=9000.0)
    first = make_request("a", 4, 2, slo=promised)
    first.history.demoted = True
    driver.add(first)
    for number, name in enumerate("bc"):
        prompt = range(100 * number, 100 * number + 7)
        driver.add(make_request(name, prompt, 6, arrival=0.1 + number, slo=promised))
    driver.step()
    assert [[row.request_id for row in plan.rows] for plan in driver.plans] == [list("abc")] * 2
    plan = driver.plan()
    assert [row.request_id for row in plan.rows] == ["b"]
    running = [request.request_id for request in driver.scheduler._running.requests]
    assert running == ["a", "b"], "c made way"
    driver.run()
    assert driver.finished["a"].num_preemptions == 0
    assert len(driver.finished) == 3
