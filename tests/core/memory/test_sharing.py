"""Prompts that begin alike share their blocks, and so do forks."""

from __future__ import annotations

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.core.outputs import SchedulerOutput
from paceline.core.request import FinishReason
from tests.driving import Driver, make_request


def tokens_per_row(plan: SchedulerOutput) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


# ---------------------------------------------------------------- prefix caching


def test_a_cached_prefix_is_not_computed_again() -> None:
    driver = Driver(block_size=4)
    driver.add(make_request("a", 14, 2))
    driver.run()
    driver.add(make_request("b", [*range(1, 13), 90, 91], 2))
    driver.run()
    first = next(row for plan in driver.plans for row in plan.rows if row.request_id == "b")
    assert (first.start, first.num_tokens) == (12, 2)
    assert driver.finished["b"].num_cached_tokens == 12
    assert driver.tokens["b"] == expected_tokens([*range(1, 13), 90, 91], 2, 997)
    assert driver.scheduler.stats().prefix_cache_hits == 12


def test_at_least_one_token_is_computed_of_a_fully_cached_prompt() -> None:
    driver = Driver(block_size=4)
    for name in "ab":
        driver.add(make_request(name, 12, 1))
        driver.run()
    assert driver.finished["b"].num_cached_tokens == 8
    assert driver.tokens["a"] == driver.tokens["b"]


def test_requests_of_one_step_share_a_prefix() -> None:
    driver = Driver(block_size=4)
    driver.add(make_request("a", 13, 1), make_request("b", 13, 1))
    driver.step()
    assert tokens_per_row(driver.plans[0]) == {"a": 13, "b": 1}
    assert driver.tokens["a"] == driver.tokens["b"] == expected_tokens(range(1, 14), 1, 997)


def test_generated_tokens_are_cached_too() -> None:
    driver = Driver(block_size=4)
    driver.add(make_request("a", 6, 8))
    driver.run()
    conversation = [*range(1, 7), *driver.tokens["a"], 5]
    driver.add(make_request("b", conversation, 1))
    driver.run()
    assert driver.finished["b"].num_cached_tokens == 12


def test_another_salt_shares_nothing() -> None:
    driver = Driver(block_size=4)
    driver.add(make_request("a", 13, 1, cache_salt="tenant-1"))
    driver.run()
    driver.add(make_request("b", 13, 1, cache_salt="tenant-2"), make_request("c", 13, 1))
    driver.run()
    driver.add(make_request("d", 13, 1, cache_salt="tenant-1"))
    driver.run()
    cached = {name: driver.finished[name].num_cached_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 12}


def test_prefix_caching_can_be_turned_off() -> None:
    driver = Driver(enable_prefix_caching=False)
    for name in "ab":
        driver.add(make_request(name, 13, 1))
        driver.run()
    assert driver.finished["b"].num_cached_tokens == 0
    assert driver.scheduler.stats().prefix_cache_queries == 0


@pytest.mark.parametrize(("first", "survived"), [(100, 4), (200, 12)])
def test_the_oldest_prefix_is_evicted_first_and_its_tail_before_its_head(
    first: int, survived: int
) -> None:
    driver = Driver(num_blocks=9, block_size=4)
    for start in (100, 200):
        driver.add(make_request(f"prompt-{start}", range(start, start + 13), 1))
        driver.run()
    # 3 full blocks of each are cached; 5 fresh blocks leave room for 4 of these 6
    driver.add(make_request("big", range(300, 320), 1))
    driver.run()
    driver.add(make_request("again", range(first, first + 13), 1))
    driver.run()
    assert driver.finished["again"].num_cached_tokens == survived


# ---------------------------------------------------------------- forks (n > 1)


def test_forks_share_the_prompt_and_copy_only_the_tail() -> None:
    prompt = list(range(1, 15))
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8)
    driver.add(make_request("p/0", prompt, 6))
    driver.add(*(make_request(f"p/{i}", prompt, 6, fork_of="p/0") for i in (1, 2, 3)))
    driver.step()
    assert tokens_per_row(driver.plans[0]) == {"p/0": 14}, "forks wait for the parent's prompt"
    assert driver.scheduler.stats().num_waiting == 3
    driver.step()
    assert tokens_per_row(driver.plans[1]) == {f"p/{i}": 1 for i in range(4)}
    copies = driver.plans[1].block_copies
    # four writers of one partial block: three copy it, the last keeps it
    assert len(copies) == 3
    assert len({copy.src for copy in copies}) == 1
    used = driver.cache.num_blocks - driver.scheduler.kv.pool.num_free
    assert used == 3 + 4, "3 full prompt blocks shared, one tail each"
    driver.run()
    for i in range(4):
        assert driver.tokens[f"p/{i}"] == expected_tokens(prompt, 6, 997)


def test_forks_outlive_an_aborted_parent() -> None:
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4)
    prompt = list(range(1, 21))
    driver.add(make_request("p/0", prompt, 4), make_request("p/1", prompt, 4, fork_of="p/0"))
    driver.step()
    driver.abort("p/0")
    driver.run()
    assert driver.tokens["p/1"] == expected_tokens(prompt, 4, 997)
    assert driver.finished["p/0"].finish_reason is FinishReason.ABORT


def test_a_waiting_fork_can_be_aborted() -> None:
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4)
    prompt = list(range(1, 21))
    driver.add(make_request("p/0", prompt, 4), make_request("p/1", prompt, 4, fork_of="p/0"))
    driver.step()
    driver.abort("p/1")
    driver.run()
    assert driver.tokens["p/0"] == expected_tokens(prompt, 4, 997)
