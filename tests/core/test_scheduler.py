"""The scheduler's promises, one by one, over the null backend's hand-computable tokens."""

from __future__ import annotations

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.request import FinishReason
from paceline.errors import ConfigError, InvalidRequestError, NeverFitsError
from tests.driving import Driver, make_request


def tokens_per_row(plan: SchedulerOutput) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


# ---------------------------------------------------------------- batching and budget


def test_a_request_gets_the_tokens_computed_by_hand() -> None:
    driver = Driver(vocab_size=100)
    driver.add(make_request("a", [3, 5], 3))
    driver.run()
    assert driver.tokens["a"] == [13, 52, 60]
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    driver = Driver(max_num_batched_tokens=10, max_num_seqs=4)
    driver.add(make_request("short", 2, 20))
    driver.step()
    driver.add(make_request("long", list(range(50, 75)), 2))
    shares = []
    for _ in range(4):
        driver.step()
        shares.append(tokens_per_row(driver.plans[-1]))
    assert shares == [
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 7},
        {"short": 1, "long": 1},
    ]
    samples = [
        row.samples for plan in driver.plans for row in plan.rows if row.request_id == "long"
    ]
    assert samples == [False, False, True, True], "only a chunk that catches up samples"
    driver.run()
    assert driver.tokens["long"] == expected_tokens(range(50, 75), 2, 997)


def test_everyone_running_gets_a_token_while_an_older_prompt_is_computed() -> None:
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=4, policy="priority")
    for name in "abc":
        driver.add(make_request(name, 2, 30, priority=1))
    driver.step()
    # better priority, so it comes first in the order; still the others move
    driver.add(make_request("urgent", list(range(200, 240)), 2, priority=0))
    driver.step()
    for _ in range(5):
        driver.step()
        assert tokens_per_row(driver.plans[-1]) == {"urgent": 5, "a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_the_budget_changes_the_number_of_steps_not_the_tokens(budget: int) -> None:
    driver = Driver(max_num_batched_tokens=budget, max_num_seqs=4)
    driver.add(make_request("a", 40, 3))
    driver.run()
    assert driver.tokens["a"] == expected_tokens(range(1, 41), 3, 997)
    assert len(driver.plans) == -(-40 // budget) + 2


def test_max_num_seqs_bounds_the_running_requests() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(*(make_request(name, 3, 4) for name in "abcde"))
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 2
    assert set(driver.finished) == set("abcde")


def test_config_refuses_a_budget_below_the_number_of_sequences() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=4 .* max_num_seqs=8"):
        Driver(max_num_batched_tokens=4, max_num_seqs=8)


# ---------------------------------------------------------------- admission of requests


def test_a_request_longer_than_the_context_is_refused_with_the_numbers() -> None:
    driver = Driver(max_model_len=32)
    with pytest.raises(NeverFitsError, match=r"20 prompt .* 13 output .* = 33 .* 32 tokens"):
        driver.add(make_request("a", 20, 13))
    driver.add(make_request("b", 20, 12))
    driver.run()


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    driver = Driver(num_blocks=5, block_size=4)
    with pytest.raises(
        NeverFitsError, match=r"need 6 KV blocks of 4 tokens; the whole cache has 5"
    ):
        driver.add(make_request("a", 10, 12))
    driver.add(make_request("fits exactly", 10, 11))
    driver.run()
    assert len(driver.tokens["fits exactly"]) == 11


def test_empty_prompts_duplicates_and_orphan_forks_are_refused() -> None:
    driver = Driver()
    with pytest.raises(InvalidRequestError, match="empty"):
        driver.add(make_request("a", []))
    driver.add(make_request("a", 3))
    with pytest.raises(InvalidRequestError, match="in use"):
        driver.add(make_request("a", 3))
    with pytest.raises(InvalidRequestError, match="no live request"):
        driver.add(make_request("b", 3, fork_of="nobody"))
    driver.run()


# ---------------------------------------------------------------- memory pressure


def test_preemption_recomputes_and_changes_no_token() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.add(make_request("a", range(10, 22), 16), make_request("b", range(50, 62), 16))
    driver.run()
    assert driver.finished["b"].num_preemptions >= 1, "the youngest gives way"
    assert driver.finished["a"].num_preemptions == 0
    assert driver.tokens["a"] == expected_tokens(range(10, 22), 16, 997)
    assert driver.tokens["b"] == expected_tokens(range(50, 62), 16, 997)


def test_a_preempted_request_takes_its_surviving_blocks_back() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.add(make_request("a", range(10, 22), 16), make_request("b", range(50, 62), 16))
    driver.run()
    resumed = [
        row
        for plan in driver.plans
        for new in plan.new_requests
        for row in plan.rows
        if row.request_id == new.request_id == "b" and len(new.token_ids) > 12
    ]
    assert resumed
    assert resumed[-1].start > 0, "the prefix that was not evicted is not recomputed"
    stats = driver.scheduler.stats()
    assert 0 < stats.num_recomputed_tokens < 12 + 16


def test_without_prefix_caching_everything_is_recomputed() -> None:
    recomputed = {}
    for caching in (True, False):
        driver = Driver(num_blocks=8, block_size=4, enable_prefix_caching=caching)
        driver.add(make_request("a", range(10, 22), 16), make_request("b", range(50, 62), 16))
        driver.run()
        recomputed[caching] = driver.scheduler.stats().num_recomputed_tokens
    assert recomputed[True] < recomputed[False]


def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_skips=3, max_num_seqs=8)
    driver.add(make_request("runner", range(100, 132), 24))
    driver.step()
    driver.add(make_request("large", range(200, 240), 2))
    for index in range(10):
        driver.add(make_request(f"small-{index}", [index + 1], 3))
    admitted = []
    while "large" not in admitted:
        assert driver.step()
        admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
    before = admitted[: admitted.index("large")]
    assert before == ["runner", "small-0", "small-1", "small-2"]
    driver.run()


def test_max_skip_ahead_bounds_how_far_behind_the_head_is_looked() -> None:
    def admitted_beside(window: int) -> list[str]:
        driver = Driver(num_blocks=16, block_size=4, max_skip_ahead=window, max_num_seqs=8)
        driver.add(make_request("runner", range(100, 132), 24))
        driver.step()
        for index in range(2):
            driver.add(make_request(f"large-{index}", range(200 + 50 * index, 240 + 50 * index), 2))
        driver.add(make_request("small", [1], 2))
        driver.step()
        names = [new.request_id for plan in driver.plans[1:] for new in plan.new_requests]
        driver.run()
        return names

    assert admitted_beside(0) == []
    assert admitted_beside(1) == []
    assert admitted_beside(2) == ["small"]


def test_the_watermark_keeps_room_for_those_running() -> None:
    def preemptions(watermark: float) -> int:
        driver = Driver(num_blocks=10, block_size=4, watermark=watermark)
        driver.add(make_request("a", range(10, 26), 8))
        driver.step()
        driver.add(make_request("b", range(50, 70), 8))
        driver.run()
        return driver.scheduler.stats().num_preemptions

    assert preemptions(0.0) == 1
    assert preemptions(0.3) == 0


# ---------------------------------------------------------------- order


def test_fcfs_admits_in_order_of_arrival_whatever_the_order_of_adding() -> None:
    driver = Driver(max_num_seqs=1)
    for name, arrival in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        driver.add(make_request(name, 3, 2, arrival=arrival))
    driver.run()
    assert [n.request_id for p in driver.plans for n in p.new_requests] == [
        "early",
        "middle",
        "late",
    ]


def test_priority_preempts_a_running_request_and_puts_it_back_in_its_place() -> None:
    driver = Driver(max_num_seqs=1, policy="priority")
    driver.add(make_request("low", 5, 10, priority=5), make_request("lower", 5, 2, priority=6))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", range(70, 75), 2, arrival=2.0, priority=0))
    driver.run()
    assert [n.request_id for p in driver.plans for n in p.new_requests] == [
        "low",
        "urgent",
        "low",
        "lower",
    ]
    assert driver.tokens["low"] == expected_tokens(range(1, 6), 10, 997)


def test_fcfs_never_displaces() -> None:
    driver = Driver(max_num_seqs=1, policy="fcfs")
    driver.add(make_request("first", 5, 10, priority=5))
    driver.step()
    driver.add(make_request("second", 5, 2, arrival=1.0, priority=0))
    driver.run()
    assert driver.finished["first"].num_preemptions == 0


def test_priority_displaces_for_memory_only_as_many_as_needed() -> None:
    driver = Driver(num_blocks=12, block_size=4, policy="priority", max_num_seqs=8)
    for index, name in enumerate("abc"):
        driver.add(make_request(name, range(20 * index, 20 * index + 14), 2, priority=1 + index))
    driver.plan()
    driver.add(make_request("urgent", range(500, 514), 2, priority=0))
    driver.settle()
    driver.run()
    preempted = {name: driver.finished[name].num_preemptions for name in "abc"}
    assert preempted == {"a": 0, "b": 0, "c": 1}


def test_nobody_is_displaced_in_vain() -> None:
    driver = Driver(num_blocks=8, block_size=4, policy="priority", max_num_seqs=8)
    driver.add(make_request("peer", range(40, 56), 4, priority=0))
    driver.add(make_request("low", range(20, 28), 2, priority=9))
    driver.plan()
    # even without "low" there is no room beside "peer", which is not worse
    driver.add(make_request("large", range(100, 120), 2, arrival=1.0, priority=0))
    driver.plan()
    driver.settle()
    driver.run()
    assert driver.finished["low"].num_preemptions == 0


def test_whoever_displaces_another_has_a_row_in_that_step() -> None:
    driver = Driver(max_num_seqs=2, num_blocks=400, policy="priority")
    driver.add(make_request("stream", range(2000, 2004), 20, arrival=0.5, priority=1))
    driver.step()
    # before the stream in the order, and with use for every token of a step
    driver.add(make_request("prompt", 800, 2, priority=1))
    driver.step()
    driver.add(make_request("urgent", range(3000, 3008), 2, arrival=driver.now, priority=0))
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 1
    assert tokens_per_row(driver.plans[-1]) == {"prompt": 64 - 8, "urgent": 8}
    driver.run()


def test_waiting_ages_a_low_priority_request_past_fresh_urgent_ones() -> None:
    def position_of_low(ageing: float) -> int:
        driver = Driver(max_num_seqs=1, policy="priority", priority_ageing_s=ageing)
        driver.add(make_request("first", 3, 2, priority=0))
        driver.step()
        driver.add(make_request("low", 3, 2, arrival=0.0, priority=1))
        for index in range(20):
            driver.add(make_request(f"u{index}", 3, 2, arrival=driver.now, priority=0))
            driver.step()
            driver.step()
        driver.run()
        return [n.request_id for p in driver.plans for n in p.new_requests].index("low")

    assert position_of_low(10.0) < 12
    assert position_of_low(1e6) == 21


# ---------------------------------------------------------------- ends


def test_eos_stop_ids_and_min_tokens() -> None:
    expected = expected_tokens([3, 5], 8, 100)
    assert expected[:3] == [13, 52, 60]
    driver = Driver(vocab_size=100)
    driver.add(
        make_request("eos", [3, 5], 8, eos_token_ids=frozenset({52})),
        make_request("stop", [3, 5], 8, stop_token_ids=frozenset({60})),
        make_request("one", [3, 5], 8, eos_token_ids=frozenset({52}), min_tokens=1),
        make_request("two", [3, 5], 8, eos_token_ids=frozenset({52}), min_tokens=2),
    )
    driver.run()
    assert driver.tokens["eos"] == [13, 52]
    assert driver.finished["eos"].stop_reason is None
    assert driver.tokens["stop"] == [13, 52, 60]
    assert driver.finished["stop"].stop_reason == 60
    assert driver.tokens["one"] == [13, 52]
    assert len(driver.tokens["two"]) == 8, "the second token may not be 52 yet"
    assert driver.tokens["two"][1] == 53
    for name in ("eos", "stop", "one"):
        assert driver.finished[name].finish_reason is FinishReason.STOP


def test_an_abort_frees_blocks_at_once_and_the_result_in_flight_is_dropped() -> None:
    driver = Driver(num_blocks=16)
    driver.add(make_request("a", 20, 8), make_request("b", range(60, 70), 4))
    driver.plan()
    driver.abort("a")
    assert driver.scheduler.kv.pool.num_free == 16 - 3
    driver.settle()
    assert driver.tokens["a"] == []
    driver.run()
    assert driver.tokens["b"] == expected_tokens(range(60, 70), 4, 997)
    assert any("a" in plan.released for plan in driver.plans)


def test_what_was_computed_for_nobody_is_counted_and_nothing_else() -> None:
    driver = Driver(block_size=4, max_num_seqs=3)

    def discarded() -> int:
        return driver.scheduler.stats().num_discarded_tokens

    driver.add(make_request("a", 14, 2))
    driver.run()
    assert discarded() == 0
    # 12 of 14 tokens are cached
    driver.add(make_request("b", 14, 8))
    driver.step()
    driver.abort("b")
    assert discarded() == 2
    # of three with one prompt of 5 tokens, two do not compute it
    prompt = range(50, 55)
    driver.add(make_request("p/0", prompt, 8))
    driver.add(*(make_request(f"p/{i}", prompt, 8, fork_of="p/0") for i in (1, 2)))
    driver.step()
    driver.abort("p/1")
    assert discarded() == 2, "it has not begun"
    driver.step()
    driver.abort("p/0", "p/2")
    assert discarded() == 2 + 6 + 1
    # what a preemption has taken away was computed
    driver.add(make_request("c", range(70, 80), 8))
    driver.step()
    driver.scheduler._running.preempt(driver.scheduler._requests["c"], driver.now)
    driver.abort("c")
    assert discarded() == 9 + 10


def test_aborting_an_unknown_request_is_harmless() -> None:
    assert Driver().scheduler.abort(["nobody"]) == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_one_poisoned_request_fails_alone_and_its_blocks_are_not_reused(depth: int) -> None:
    driver = Driver(poison_token=13, block_size=4, depth=depth)
    good, bad = range(20, 30), [1, 2, 3, 4, 13, 6, 7, 8, 9]
    driver.add(make_request("bad", bad, 4), make_request("good", good, 4))
    driver.run()
    assert driver.finished["bad"].finish_reason is FinishReason.ERROR
    assert driver.finished["bad"].error == "token 13 is poison"
    assert driver.tokens["good"] == expected_tokens(good, 4, 997)
    driver.add(make_request("again", [*bad[:4], 5], 1))
    driver.run()
    assert driver.finished["again"].num_cached_tokens == 0


# ---------------------------------------------------------------- planning ahead


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_planning_ahead_changes_no_token(depth: int) -> None:
    driver = Driver(depth=depth, num_blocks=14, block_size=4, max_num_batched_tokens=16)
    prompts = {name: list(range(30 * i, 30 * i + 11)) for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 9))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == expected_tokens(prompt, 9, 997)


def test_step_n_plus_1_is_planned_before_the_token_of_step_n_is_known() -> None:
    driver = Driver()
    driver.add(make_request("a", 5, 3))
    first, second, third = driver.plan(), driver.plan(), driver.plan()
    assert [row.start for plan in (first, second, third) for row in plan.rows] == [0, 5, 6]
    assert driver.plan().rows == (), "max_tokens is known ahead: no step is wasted"
    for _ in range(3):
        driver.settle()
    assert driver.tokens["a"] == expected_tokens(range(1, 6), 3, 997)


def test_results_must_come_in_the_order_of_plans() -> None:
    driver = Driver()
    driver.add(make_request("a", 5, 3))
    driver.plan()
    second = driver.plan()
    with pytest.raises(AssertionError, match="plan order"):
        driver.scheduler.update(second, StepResult(second.step_id, ((1,),)), 0.0)


def test_the_same_events_give_the_same_plans() -> None:
    def plans() -> list[SchedulerOutput]:
        driver = Driver(num_blocks=14, block_size=4, policy="priority", max_num_batched_tokens=20)
        for index in range(12):
            driver.add(
                make_request(
                    f"r{index}",
                    range(index, index + 9 + index % 5),
                    5 + index % 3,
                    arrival=driver.now,
                    priority=index % 3,
                )
            )
            driver.step()
        driver.run()
        return driver.plans

    assert plans() == plans()


def test_a_simulator_may_ask_for_the_ends_alone() -> None:
    told: list[list[str]] = []
    for tell_all in (True, False):
        driver = Driver(num_blocks=100)
        for index in range(4):
            driver.add(make_request(f"r{index}", 6, 2 + index))
        ends = []
        while driver.scheduler.has_unfinished:
            plan = driver.scheduler.schedule(driver.now)
            result = driver.backend.execute(plan).result()
            updates = driver.scheduler.update(plan, result, driver.now, tell_all=tell_all)
            assert tell_all or all(update.finish_reason is not None for update in updates)
            ends += [u.request_id for u in updates if u.finish_reason is not None]
        told.append(ends)
    assert told[0] == told[1] == ["r0", "r1", "r2", "r3"]
