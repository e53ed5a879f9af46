"""Window blocks: bounded by windows, found with prefixes, never taken from who reads them.

The null backend fails a row whose window does not find in its window blocks what belongs there, and
the driver checks the books at every step.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.config import CacheConfig
from paceline.core.memory.windows import WindowBlocks
from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from tests.driving import Driver, make_request

VOCAB = 997


def driver(**settings: Any) -> Driver:
    return Driver(**({"window": 9, "num_blocks": 400, "vocab_size": VOCAB} | settings))


def windows_of(each: Driver) -> WindowBlocks:
    windows = each.scheduler.kv.windows
    assert windows is not None
    return windows


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % VOCAB for i in range(length)]


def ask(each: Driver, name: str, tokens: list[int], count: int, **asked: Any) -> None:
    each.add(make_request(name, tokens, count, **asked))


def right(each: Driver, name: str, tokens: list[int], count: int) -> bool:
    return each.tokens[name] == expected_tokens(tokens, count, VOCAB)


def shape(plan: SchedulerOutput) -> tuple[object, ...]:
    """All of a plan but its window blocks."""
    new = [(each.request_id, each.block_ids) for each in plan.new_requests]
    return plan.rows, new, plan.block_copies, plan.released, plan.swaps


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_request_holds_is_bounded_by_its_window(depth: int) -> None:
    each = driver(depth=depth)
    ask(each, "a", prompt(100), 200)
    request = each.scheduler._requests["a"]
    most = 0
    while each.step():
        most = max(most, len(request.window_indices))
        if request.window_indices:
            # of all that the next row reads the oldest
            oldest = max(0, request.num_computed_tokens - 9 + 1)
            assert request.window_indices.start == oldest // 4
    # 9 positions of blocks of 4, whose first begins anywhere, and the next
    assert 3 <= most <= 4
    assert right(each, "a", prompt(100), 200)


@pytest.mark.parametrize("caching", [True, False])
def test_no_other_decision_depends_on_them(caching: bool) -> None:
    """Requests, forks, and too few blocks for all of them."""
    found = []
    for window in (0, 9):
        each = driver(window=window, num_blocks=40, enable_prefix_caching=caching, depth=2)
        for index in range(6):
            tokens = prompt(13 + 11 * index, first=index)
            ask(each, f"{index}", tokens, 30)
            ask(each, f"{index}/1", tokens, 30, fork_of=f"{index}")
        each.run()
        assert all(right(each, f"{i}", prompt(13 + 11 * i, first=i), 30) for i in range(6))
        found.append([shape(plan) for plan in each.plans])
        assert any(plan.window_blocks for plan in each.plans) is (window > 0)
    assert found[0] == found[1]
    assert each.scheduler.stats().num_preemptions > 0


def test_a_full_house_never_lacks_one() -> None:
    """With as few as ``window_blocks_needed`` says, and steps full of chunks."""
    each = driver(num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=48, depth=2)
    needed = each.cache.num_window_blocks
    assert needed < 200
    for index in range(24):
        ask(each, f"{index}", prompt(150 + index, first=index), 60)
    each.run()
    assert all(right(each, f"{i}", prompt(150 + i, first=i), 60) for i in range(24))
    assert each.scheduler.stats().num_preemptions == 0
    # while those would have been 8 x 55 blocks
    assert max(p.window_block for plan in each.plans for p in plan.window_blocks) < needed


def test_a_prefix_is_found_with_the_blocks_of_its_last_window() -> None:
    each = driver()
    ask(each, "a", prompt(83), 4)
    each.run()
    # the last of 20 full blocks that the second shares
    ask(each, "b", prompt(81) + prompt(9, first=5), 4)
    each.run()
    assert each.finished["b"].num_cached_tokens == 80
    assert right(each, "b", prompt(81) + prompt(9, first=5), 4)
    # blocks in the middle have lost nothing either, as long as none were needed
    ask(each, "c", prompt(41) + prompt(9, first=6), 4)
    each.run()
    assert each.finished["c"].num_cached_tokens == 40


def test_a_prefix_without_its_window_is_computed_again_and_found_from_then_on() -> None:
    """The blocks are all there, but others have taken the window blocks."""
    each = driver(max_num_seqs=2, num_blocks=4000)
    ask(each, "a", prompt(83), 4)
    each.run()
    for index in range(8):
        ask(each, f"other {index}", prompt(90, first=100 + index), 4)
        each.run()
    assert each.scheduler.kv.pool.num_cached_free > 9 * 20, "all prefixes are in the pool"
    ask(each, "b", prompt(83), 4)
    each.run()
    assert each.finished["b"].num_cached_tokens == 0
    ask(each, "c", prompt(83), 4)
    each.run()
    assert each.finished["c"].num_cached_tokens == 80
    for name in "abc":
        assert right(each, name, prompt(83), 4)


def test_no_more_idle_ones_than_prefixes_may_keep() -> None:
    """Memory that was never used is taken last."""
    each = driver(max_idle_blocks=3, max_num_seqs=4)
    ask(each, "a", prompt(10), 400)
    each.run()
    used = {given.window_block for plan in each.plans for given in plan.window_blocks}
    # a window and a block to begin with
    assert len(used) <= 4 + 1 + 3 + 1 < each.cache.num_window_blocks


def test_free_ones_are_counted() -> None:
    each = driver()
    count = each.cache.num_window_blocks
    stats = each.scheduler.stats
    assert (stats().num_window_blocks, stats().num_free_window_blocks) == (count, count)
    ask(each, "a", prompt(20), 8)
    each.step()
    # of 20 tokens of blocks of 4, those that a window of 9 reaches from position 20 on
    assert stats().num_free_window_blocks == count - 2
    each.run()
    # what is findable is free, as in the pool
    assert stats().num_free_window_blocks == count
    assert driver(window=0).scheduler.stats().num_window_blocks == 0


def test_where_the_other_blocks_run_out_requests_wait_and_are_preempted_for_memory() -> None:
    """The division is fixed: window blocks may be free meanwhile, and are of no use."""
    each = driver(num_blocks=24, max_num_batched_tokens=256)
    for index in range(3):
        ask(each, f"{index}", prompt(40, first=index), 30)
    held = set()
    while each.step():
        each.now += 1.0
        stats = each.scheduler.stats()
        if stats.blocked_by is not None:
            held.add(stats.blocked_by)
            assert stats.num_free_window_blocks > 0
    assert held == {"memory"}
    assert each.scheduler.stats().num_preemptions > 0
    for index in range(3):
        assert right(each, f"{index}", prompt(40, first=index), 30)
    # which is what their callers are told
    told = [each.finished[f"{index}"].timeline for index in range(3)]
    assert any(one is not None and one.num_preemptions for one in told)
    for one in told:
        assert one is not None
        assert [reason for reason, seconds in one.waited if seconds] in ([], ["memory"])
    assert any(one is not None and dict(one.waited).get("memory", 0.0) > 0.0 for one in told)


@pytest.mark.parametrize("length", [16, 18, 19])
def test_forks_take_a_copy_of_the_shared_tail(length: int) -> None:
    each = driver(window=6)
    for index in range(4):
        fork_of = "0" if index else None
        ask(each, f"{index}", prompt(length), 20, fork_of=fork_of)
    each.run()
    assert all(right(each, f"{index}", prompt(length), 20) for index in range(4))
    copies = sum(len(plan.block_copies) for plan in each.plans)
    copied = [given for plan in each.plans for given in plan.window_blocks if given.source >= 0]
    assert copies == len(copied) > 0


def test_a_fork_that_comes_when_its_window_has_moved_on_starts_by_itself() -> None:
    each = driver(window=6, max_num_seqs=3)
    ask(each, "a", prompt(18), 150)
    # what the first drops is taken by others
    for index in range(6):
        ask(each, f"other {index}", prompt(80, first=100 + index), 4)
    for _ in range(80):
        each.step()
    ask(each, "b", prompt(18), 60, fork_of="a")
    each.run()
    assert right(each, "a", prompt(18), 150) and right(each, "b", prompt(18), 60)
    starts = [row.start for plan in each.plans for row in plan.rows if row.request_id == "b"]
    assert starts[0] == 0
    # one that comes in time shares the prompt
    ask(each, "c", prompt(18), 60)
    each.step()
    ask(each, "d", prompt(18), 60, fork_of="c")
    each.run()
    starts = [row.start for plan in each.plans for row in plan.rows if row.request_id == "d"]
    assert starts[0] == 17 and right(each, "d", prompt(18), 60)


def test_drafts_are_covered() -> None:
    """Wrong drafts are computed again, in a window that has not moved on."""
    config = {"method": "auto", "num_speculative_tokens": 5, "model": "another"}
    each = driver(window=3, block_size=1, speculative_config=config, draft_wrong=(1,))
    ask(each, "a", prompt(30), 90)
    each.run()
    assert right(each, "a", prompt(30), 90)
    stats = each.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_the_check_finds_a_window_block_dropped_too_soon() -> None:
    each = driver()
    ask(each, "a", prompt(40), 20)
    each.step()
    request = each.scheduler._requests["a"]
    held = request.window_indices
    request.window_indices = range(held.start + 1, held.stop)
    with pytest.raises(AssertionError, match="request a reads from block 8 on and holds"):
        each.scheduler.check_integrity()
    request.window_indices = held
    windows_of(each)._drop([request.block_ids[held.start]])
    with pytest.raises(AssertionError, match="held by requests that do not read"):
        each.scheduler.check_integrity()


def test_the_null_backend_finds_a_window_block_that_somebody_else_wrote() -> None:
    each = driver()
    ask(each, "a", prompt(40), 20)
    each.step()
    assert isinstance(each.backend, NullBackend)
    for block in each.backend._window_cache:
        block[:] = [0] * 4
    with pytest.raises(AssertionError, match=r"a: window block \d+ has 0"):
        each.run()


def test_they_are_not_swapped() -> None:
    with pytest.raises(
        ConfigError, match="num_window_blocks=9 are not swapped: num_host_blocks must be 0"
    ):
        CacheConfig(block_size=4, num_blocks=9, window=5, num_window_blocks=9, num_host_blocks=1)
