"""Why requests waited: the clocks, and what the scheduler charges to each."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.queues.wait_clocks import REASONS, Reason, WaitClocks
from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import Driver, ask, make_request


def test_a_wait_is_the_difference_of_two_readings() -> None:
    clocks = WaitClocks()
    clocks.note(Reason.SLOTS, 0.0)
    clocks.note(Reason.MEMORY, 2.0)
    reading = clocks.reading()
    clocks.note(Reason.MEMORY, 5.0)
    clocks.note(None, 6.0)
    clocks.note(None, 9.0)
    spent = dict(zip(REASONS, clocks.since(reading, 4.5), strict=True))
    assert spent["memory"] == 4.0
    assert spent["step"] == 0.5, "what no clock covers"
    assert sum(spent.values()) == 4.5


def test_what_a_clock_ran_before_the_wait_began_is_not_charged() -> None:
    clocks = WaitClocks()
    clocks.note(Reason.SLOTS, 0.0)
    reading = clocks.reading()
    clocks.note(None, 10.0)
    assert clocks.since(reading, 1.0)[Reason.SLOTS] == 1.0


def waited(driver: Driver, request_id: str) -> dict[str, float]:
    timeline = driver.finished[request_id].timeline
    assert timeline is not None
    return dict(timeline.waited)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("slots", {"max_num_seqs": 1}),
        ("budget", {"max_num_batched_tokens": 9}),
        ("memory", {"num_blocks": 20}),
        ("policy", {"policy": "phase-aligned", "coalesce_window_s": 1000.0}),
        ("policy", {"policy": "static"}),
    ],
)
def test_each_obstacle_has_its_name(reason: str, options: dict[str, Any]) -> None:
    driver = Driver(**({"num_blocks": 200} | options))
    driver.add(make_request("a", range(1, 41), 20))
    driver.step()
    arrival = driver.now
    driver.add(make_request("b", range(100, 140), 4, arrival=arrival))
    driver.run()
    spent = waited(driver, "b")
    assert spent[reason] > 0.0
    first = driver.finished["b"].first_scheduled_time
    assert sum(spent.values()) == pytest.approx(first - arrival)


def test_a_request_that_would_spoil_the_pace_says_so() -> None:
    driver = Driver(seconds=lambda shape: 0.1 * (shape.narrow_rows + (shape.wide_tokens > 0)))
    driver.add(make_request("warm", 4, 40), make_request("up", 4, 20))
    driver.run()
    driver.add(make_request("a", 4, 20, arrival=driver.now, slo=Slo(tpot=0.15)))
    driver.step()
    driver.add(make_request("b", 8, 4, arrival=driver.now))
    driver.run()
    assert waited(driver, "b")["pace"] > 5.0
    assert "pace" not in waited(driver, "a")


def test_the_last_step_of_a_wait_is_charged_to_what_held_the_request_up() -> None:
    driver = Driver(max_num_seqs=1, num_blocks=200)
    driver.add(make_request("a", 4, 3))
    driver.step()
    driver.add(make_request("b", 4, 2, arrival=driver.now))
    driver.plan()
    # while a step is under way for which it could not be planned
    driver.add(make_request("c", 4, 2, arrival=driver.now + 0.25))
    driver.now += 1.0
    driver.settle()
    driver.run()
    assert waited(driver, "b") == {"slots": 2.0}
    assert waited(driver, "c") == {"step": 0.75, "slots": 3.0}


def test_the_timeline_counts_chunks_and_what_was_done_twice() -> None:
    driver = Driver(max_num_batched_tokens=16, num_blocks=200)
    driver.add(make_request("a", 40, 4))
    driver.run()
    timeline = driver.finished["a"].timeline
    assert timeline is not None
    assert timeline.num_chunks == 3
    assert timeline.num_preemptions == timeline.num_recomputed_tokens == 0
    assert timeline.predicted_ttft is None and not timeline.demoted


@pytest.mark.parametrize("depth", [1, 2])
def test_the_story_so_far_is_told_whenever_it_may_have_changed(depth: int) -> None:
    """Whoever stops reading at some token knows what one who reads to the end does."""
    driver = Driver(num_blocks=30, max_num_batched_tokens=8, depth=depth)
    for i in range(6):
        driver.add(make_request(f"r{i}", range(20 * i + 1, 20 * i + 13), 24))
    driver.run()
    assert sum(len(told) > 1 for told in driver.told.values()) > 1
    for name, update in driver.finished.items():
        assert update.timeline is not None
        told = driver.told[name]
        # not once for each preemption: some had no token in between
        assert 1 <= len(told) <= 1 + update.timeline.num_preemptions
        assert told[-1] == update.timeline
        assert told[0].num_chunks >= 2


@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_demoted_while_it_streams_is_told_with_the_next_token(depth: int) -> None:
    machine = Machine(depth=depth)
    slo = Slo(slo_class="batch", best_effort=True, deadline=5.0)
    machine.add(request := make_request("batch", 20, 40, arrival=machine.now, slo=slo))
    while not machine.told["batch"]:
        machine.step()
    ask(request, slo=Slo(slo_class="batch", best_effort=True, deadline=0.05))
    while not request.history.demoted:
        machine.step()
    machine.step()
    assert [timeline.demoted for timeline in machine.told["batch"]] == [False, True]
    machine.until_done()
    assert machine.finished["batch"].timeline == machine.told["batch"][-1]
