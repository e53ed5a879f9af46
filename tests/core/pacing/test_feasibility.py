"""Who is late counts what the prefix cache holds of a prompt, and nothing that it does not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paceline.core.request import Request
from paceline.core.slo import NO_SLO, Slo
from paceline.errors import QueueFullError
from tests.core.machine import Machine
from tests.driving import make_request

# a prompt takes 2 s to compute, and next to nothing once it is cached
PROMPT = list(range(2000))
PACED = Slo(ttft=0.5, tpot=0.1)
SOON = Slo(ttft=0.5)


def machine_that_knows_it(**config: object) -> Machine:
    machine = Machine(enable_prefix_caching=True, **config)
    machine.add(make_request("before", PROMPT, 2))
    machine.until_done()
    return machine


def demoted(machine: Machine, request_id: str) -> bool:
    timeline = machine.finished[request_id].timeline
    assert timeline is not None
    return timeline.demoted


@pytest.mark.parametrize("policy", ["fcfs", "deadline", "priority"])
def test_a_prompt_that_is_cached_is_not_late(policy: str) -> None:
    machine = machine_that_knows_it(policy=policy)
    requests = [make_request(f"r{i}", PROMPT, 2, arrival=machine.now, slo=SOON) for i in range(4)]
    unknown = make_request("unknown", list(range(5000, 7000)), 2, arrival=machine.now, slo=SOON)
    machine.add(*requests, unknown)
    start = machine.now
    machine.until_done()
    for request in requests:
        assert not demoted(machine, request.request_id)
        assert machine.finished[request.request_id].num_cached_tokens == 1996
    assert demoted(machine, "unknown"), "its prompt takes four times as long as it has"
    assert machine.now - start >= 2.0


def test_the_same_for_best_effort_with_a_deadline() -> None:
    machine = machine_that_knows_it()
    machine.add(machine.batch("batch", 4, 0.5))
    cached = make_request(
        "cached", PROMPT, 2, arrival=machine.now, slo=Slo(best_effort=True, deadline=0.5)
    )
    machine.add(cached)
    machine.until_done()
    assert not demoted(machine, "cached")


def test_what_was_cached_on_arrival_and_is_no_more_is_late() -> None:
    machine = machine_that_knows_it()
    request = make_request("again", PROMPT, 2, arrival=machine.now, slo=SOON)
    machine.add(request)
    assert request.num_new_tokens == 4
    pool = machine.scheduler.kv.pool
    pool.release(pool.allocate(pool.num_free))
    other = make_request("other", range(9000, 9010), 2, arrival=machine.now, slo=Slo(ttft=60.0))
    machine.add(other)
    machine.until_done()
    assert demoted(machine, "again")


def test_what_is_left_to_compute_is_predicted_on_arrival() -> None:
    machine = machine_that_knows_it()
    cached = make_request("cached", PROMPT, 2, arrival=machine.now)
    machine.add(cached)
    assert cached.history.predicted_ttft is not None and cached.history.predicted_ttft < 0.1
    # neither does it count for those behind it
    behind = make_request("behind", 100, 2, arrival=machine.now)
    machine.add(behind)
    assert behind.history.predicted_ttft is not None and behind.history.predicted_ttft < 0.3
    unknown = make_request("unknown", list(range(5000, 7000)), 2, arrival=machine.now)
    machine.add(unknown)
    assert unknown.history.predicted_ttft is not None and unknown.history.predicted_ttft > 2.0
    machine.until_done()


def test_forks_that_wait_for_a_place_count_for_what_they_lack() -> None:
    machine = Machine(max_num_seqs=2, future_memory_check=False)
    machine.add(make_request("p/0", PROMPT, 20))
    machine.add(*(make_request(f"p/{i}", PROMPT, 20, fork_of="p/0") for i in range(1, 6)))
    while machine.scheduler.stats().num_waiting_deferred:
        machine.step()
    machine.step()
    assert machine.scheduler.stats().num_waiting_capacity == 4
    behind = make_request("behind", 100, 2, arrival=machine.now)
    machine.add(behind)
    # six of 20 tokens each, two at a time in steps of 12 ms, and its own 100 ms
    assert behind.history.predicted_ttft == pytest.approx(0.8, abs=0.2)
    machine.until_done()
    began = machine.finished["behind"].first_scheduled_time
    assert began is not None
    predicted = behind.history.predicted_ttft
    assert predicted is not None
    assert began - behind.asked.arrival_time == pytest.approx(predicted - 0.1, rel=0.25)


def test_nothing_is_hashed_for_who_finds_the_queue_full() -> None:
    machine = Machine(enable_prefix_caching=True, max_num_waiting=1, max_num_seqs=1)
    machine.add(make_request("running", 100, 2))
    machine.step()
    machine.add(make_request("first", 100, 2))
    second = make_request("second", 100, 2)
    with pytest.raises(QueueFullError, match="the limit is 1"):
        machine.add(second)
    assert not second.block_hashes


@pytest.mark.parametrize(("enabled", "on_time"), [(True, True), (False, False)])
def test_one_that_runs_and_is_late_by_now_makes_way_as_well(enabled: bool, on_time: bool) -> None:
    """Its prompt takes 2 s; after the first step the machine stands still for as long."""
    machine = Machine(demote_late=enabled)
    late = make_request("late", 2000, 2, arrival=machine.now, slo=Slo(ttft=2.5))
    machine.add(late)
    machine.step()
    assert late.num_computed_tokens < 1000 and not late.history.demoted
    machine.now += 2.0
    prompt = range(5000, 5300)
    due = machine.now + 0.5
    machine.add(make_request("quick", prompt, 2, arrival=machine.now, slo=Slo(ttft=0.5)))
    while not machine.tokens["quick"]:
        machine.step()
    assert (machine.now <= due) is on_time
    machine.until_done()
    assert demoted(machine, "late") is enabled


def beside_batch_work(**config: object) -> tuple[Machine, Request]:
    """Four that nobody waits for stream; a prompt of 1.2 s has 0.5."""
    machine = Machine(max_num_seqs=8, best_effort_step_s=0.05, **config)
    machine.add(
        *(make_request(f"b{i}", 8, 500, slo=Slo(best_effort=True)) for i in range(4)),
    )
    for _ in range(10):
        machine.step()
    late = make_request("late", 1200, 2, arrival=machine.now, slo=SOON)
    machine.add(late)
    return machine, late


def until_first_token(machine: Machine, request: Request) -> float:
    while not machine.tokens[request.request_id]:
        machine.step()
    return machine.now - request.asked.arrival_time


def test_who_delays_nobody_but_best_effort_does_not_make_way() -> None:
    """Beside best effort, in steps of 50 ms of which its rows take a part, it would take longer."""
    machine, late = beside_batch_work()
    assert until_first_token(machine, late) < 1.35
    assert not late.history.demoted


def test_for_another_that_waits_it_makes_way() -> None:
    machine, late = beside_batch_work()
    other = make_request("other", 100, 2, arrival=machine.now, slo=SOON)
    machine.add(other)
    assert until_first_token(machine, other) <= 0.5
    assert until_first_token(machine, late) > 1.3
    assert late.history.demoted and not other.history.demoted


def test_of_several_that_are_all_late_the_first_goes_on() -> None:
    machine, late = beside_batch_work()
    other = make_request("other", 1200, 2, arrival=machine.now, slo=SOON)
    machine.add(other)
    assert until_first_token(machine, late) < 1.35
    assert other.history.demoted and not late.history.demoted


def test_who_delays_nobody_makes_way_as_soon_as_it_would() -> None:
    machine, late = beside_batch_work()
    machine.step()
    assert 0 < late.num_computed_tokens < 1200 and not late.history.demoted
    quick = make_request("quick", 100, 2, arrival=machine.now, slo=SOON)
    machine.add(quick)
    assert until_first_token(machine, quick) <= 0.5
    assert late.history.demoted and not quick.history.demoted


def first_token_beside_batch_work(ttft: float, **config: Any) -> tuple[Request, float, int]:
    """Of a prompt of 1.2 s that has ``ttft`` seconds, when four that nobody waits for stream: the
    request, when its first token came, and preemptions."""
    machine = Machine(best_effort_step_s=0.05, **config)
    machine.add(*(make_request(f"b{i}", 8, 300, slo=Slo(best_effort=True)) for i in range(4)))
    for _ in range(120):
        machine.step()
    request = make_request("r", 1200, 2, arrival=machine.now, slo=Slo(ttft=ttft))
    machine.add(request)
    took = until_first_token(machine, request)
    machine.until_done()
    return request, took, machine.scheduler.stats().num_preemptions


@pytest.mark.parametrize(
    "short",
    [
        {"max_num_seqs": 4, "num_blocks": 1000},
        {"max_num_seqs": 8, "num_blocks": 400, "max_model_len": 1600},
        {"max_num_seqs": 8, "num_blocks": 400, "max_model_len": 1600, "future_memory_check": True},
    ],
    ids=["places", "memory", "memory-ahead"],
)
@pytest.mark.parametrize(
    "policy", ["fcfs", "deadline", pytest.param("priority", marks=pytest.mark.thorough)]
)
def test_late_by_a_hair_displaces_best_effort_as_if_it_were_not(
    short: dict[str, Any], policy: str
) -> None:
    """It may take the others' place, or it would wait for all of their tokens."""
    in_time, took, preemptions = first_token_beside_batch_work(1.4, policy=policy, **short)
    assert not in_time.history.demoted and took < 1.3 and preemptions > 0
    for ttft in (1.15, 0.5):
        late, late_took, late_preemptions = first_token_beside_batch_work(
            ttft, policy=policy, **short
        )
        assert not late.history.demoted
        assert (late_took, late_preemptions) == (took, preemptions)


@pytest.mark.parametrize(
    ("ttft", "others", "preemptions"),
    [(1.4, PACED, 1), (0.5, PACED, 0), (1.4, NO_SLO, 1), (0.5, NO_SLO, 1)],
)
def test_who_is_late_displaces_none_that_has_a_target(
    ttft: float, others: Slo, preemptions: int
) -> None:
    """By priority others make way too, but those with a target not for a first token that comes too
    late anyway."""
    machine = Machine(policy="priority", num_blocks=1000)
    machine.add(*(make_request(f"r{i}", 8, 100, priority=5, slo=others) for i in range(4)))
    for _ in range(10):
        machine.step()
    urgent = make_request("urgent", 1200, 2, arrival=machine.now, slo=Slo(ttft=ttft))
    machine.add(urgent)
    machine.until_done()
    assert machine.scheduler.stats().num_preemptions == preemptions
    assert not urgent.history.demoted


@pytest.mark.parametrize("num_running", [0, 4])
@pytest.mark.parametrize("slo", [Slo(ttft=1.0), Slo(best_effort=True, deadline=1.0)])
def test_a_queue_of_late_ones_is_sorted_out_in_steps_that_take_others_in(
    slo: Slo, num_running: int
) -> None:
    """The machine stood still for five seconds: 1500 are late, and behind them waits one that is
    not. No step looks for it among all of them, and none is empty."""
    machine = Machine(policy="fcfs", max_num_seqs=64, best_effort_step_s=0.05, num_blocks=2000)
    machine.add(
        *(make_request(f"b{i}", 8, 900, slo=Slo(best_effort=True)) for i in range(num_running))
    )
    machine.step()
    late = [make_request(f"r{i}", 8, 2, arrival=machine.now, slo=slo) for i in range(1500)]
    machine.add(*late)
    machine.now += 5.0
    fine = make_request("fine", 8, 2, arrival=machine.now, slo=Slo(ttft=5.0))
    machine.add(fine)
    numbers = [machine.scheduler.stats().num_demoted]
    for _ in range(30):
        machine.plan()
        assert machine._flying, "nobody got the step"
        numbers.append(machine.scheduler.stats().num_demoted)
        machine.settle()
        machine.now += 0.05
    found = [after - before for before, after in pairwise(numbers)]
    assert 0 < max(found) < 400 and sum(found) > 400
    assert fine.first_token_time is not None and not fine.history.demoted
    machine.abort(*(request.request_id for request in late), *(f"b{i}" for i in range(4)))
    machine.until_done()


@pytest.mark.parametrize(("ttft", "looks"), [(30.0, False), (2.0, True)])
def test_who_comes_when_is_asked_only_if_somebody_could_be_late(
    ttft: float, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(max_num_seqs=1)
    policy = machine.scheduler.policy
    service_order, asked = policy.service_order, []

    def counted(waiting: Any) -> Any:
        asked.append(len(waiting))
        return service_order(waiting)

    monkeypatch.setattr(policy, "service_order", counted)
    # 0.6 s each
    machine.add(*(make_request(f"r{i}", 600, 2, slo=Slo(ttft=ttft)) for i in range(6)))
    machine.until_done()
    assert bool(asked) == looks
    assert any(demoted(machine, f"r{i}") for i in range(6)) == looks
