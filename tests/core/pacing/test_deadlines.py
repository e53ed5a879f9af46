"""Best-effort work with a deadline: before what is late already when it must, the fewest left out,
and nothing starves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.core.policies import POLICIES
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.running import place
from paceline.core.slo import Slo
from paceline.core.tier import Tier
from tests.core.machine import Machine, seconds
from tests.driving import Driver, ask, make_request


def demoted(machine: Driver, request_id: str) -> bool:
    timeline = machine.finished[request_id].timeline
    assert timeline is not None
    return timeline.demoted


def test_bands() -> None:
    machine = Machine()
    batch, chat = machine.batch("batch", 80, 9.0), machine.late("chat", 600)
    assert (batch.tier, chat.tier) == (Tier.DEADLINE_BATCH, Tier.ORDINARY)
    assert make_request("night", 8, slo=Slo(best_effort=True)).tier is Tier.BACKGROUND
    machine.add(batch, chat, make_request("other", 8, slo=Slo(ttft=9.0)))
    machine.step()
    assert chat.tier is Tier.DEMOTED
    assert batch.tier is Tier.DEADLINE_BATCH


@pytest.mark.parametrize(("deadline", "first"), [(80.0, "late"), (8.0, "batch")])
def test_what_is_late_already_goes_first_only_while_deadlines_do_not_press(
    deadline: float, first: str
) -> None:
    machine = Machine(max_num_seqs=1)
    # 0.6 s of work each: eight of either, and all of the late ones would make the others late
    machine.add(*(machine.late(f"late{i}", 600) for i in range(8)))
    machine.add(*(machine.batch(f"batch{i}", 600, deadline) for i in range(8)))
    ends = machine.until_done()
    order = list(ends)
    assert order[0].startswith(first)
    assert all(end <= deadline for name, end in ends.items() if name.startswith("batch"))


def test_a_pressing_deadline_comes_before_the_rows_of_what_is_late() -> None:
    machine = Machine(max_num_seqs=8)
    late = [machine.late(f"late{i}", 600) for i in range(3)]
    machine.add(*late)
    while not late[1].num_computed_tokens:
        machine.step()
    due = machine.now + 1.6
    machine.add(machine.batch("batch", 600, 1.6))
    ends = machine.until_done()
    assert ends["batch"] < ends["late1"]
    assert ends["batch"] <= due


def test_what_is_late_displaces_nobody_who_can_be_in_time() -> None:
    """It would be let in again first, in every step."""
    machine = Machine(max_num_seqs=1, policy="priority")
    batch = ask(machine.batch("batch", 600, 1.3), priority=5)
    machine.add(batch)
    machine.step()
    assert machine.scheduler._paced.feasibility.deadlines.pressing
    late = machine.late("late", 600)
    machine.add(late)
    for _ in range(40):
        machine.step()
    assert list(machine.finished) == ["batch", "late"]
    assert late.history.demoted and late.order < batch.order
    assert machine.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_lets_a_later_band_displace_an_earlier_one(policy: str) -> None:
    displaces = Machine(policy=policy).scheduler.policy.displaces
    slos = (Slo(), Slo(best_effort=True, deadline=9.0), Slo(best_effort=True), Slo(ttft=1.0))
    requests = []
    for number in range(8):
        request = make_request(f"r{number}", 4, priority=number % 2, slo=slos[number % 4])
        request.order = (float(number // 4), number)
        if number % 4 == 3:
            ask(request, slo=Slo(ttft=1.0, best_effort=True))
            request.history.demoted = True
        requests.append(request)
    pairs = [(a, b) for a in requests for b in requests if displaces(a, b)]
    assert pairs, "ordinary requests displace best effort"
    for waiting, running in pairs:
        assert waiting.tier <= running.tier
        assert place(waiting) < place(running)


def test_when_not_all_can_be_done_in_time_the_fewest_are_late() -> None:
    machine = Machine()
    # 0.6 s each for the large, 0.1 s for the small; about 5 s until all are due
    for index in range(24):
        machine.add(machine.batch(f"b{index}", 600 if index % 2 else 100, 5.0))
    ends = machine.until_done()
    assert len(ends) == 24, "left out is not lost"
    in_time = {name for name, end in ends.items() if end <= 5.0}
    left_out = {name for name in ends if demoted(machine, name)}
    assert left_out == {name for name in ends if name not in in_time and int(name[1:]) % 2}
    # in order, the large ones first, it would be eight
    assert len(in_time) >= 15


def test_a_deadline_out_of_reach_holds_nobody_up() -> None:
    def ends(*, demote_late: bool) -> dict[str, float]:
        machine = Machine(max_num_seqs=1, demote_late=demote_late)
        # the first would take 6 s, in 3; its place in the order is before the second's
        machine.add(machine.batch("hopeless", 6000, 3.0), machine.batch("fine", 600, 3.2))
        return machine.until_done()

    assert list(ends(demote_late=True)) == ["fine", "hopeless"]
    assert ends(demote_late=True)["fine"] < 3.2
    assert list(ends(demote_late=False)) == ["hopeless", "fine"]


def test_many_hopeless_are_left_out_a_few_at_a_time() -> None:
    machine = Machine(max_num_seqs=1)
    machine.add(make_request("chat", 4, 100, arrival=machine.now))
    machine.step()
    machine.add(*(machine.batch(f"b{i}", 600, 0.2) for i in range(100)))
    demoted_by = []
    for _ in range(20):
        machine.step()
        demoted_by.append(machine.scheduler.stats().num_demoted)
    at_once = [after - before for before, after in pairwise([0, *demoted_by])]
    assert max(at_once) == 32, "or the step of whoever runs would wait for it"
    assert demoted_by[-1] == 100
    first = at_once.index(32)
    assert sum(at_once[first : first + 7]) == 100, "the rest does not wait for long"
    machine.until_done()


def test_tenants_that_are_kept_apart_are_not_left_out_for_one_another() -> None:
    def missed(policy: str) -> set[str]:
        machine = Machine(max_num_seqs=2, policy=policy)
        one = machine.batch("one", 1000, 4.0)
        ask(one, tenant="light")
        machine.add(one)
        for index in range(12):
            flood = machine.batch(f"b{index}", 500, 4.0 + 0.01 * index)
            ask(flood, tenant="heavy")
            machine.add(flood)
        ends = machine.until_done()
        return {name for name in ends if demoted(machine, name)}

    assert "one" in missed("deadline"), "it is the largest"
    assert "one" not in missed("fair")


def test_best_effort_prompts_lengthen_the_steps_of_others_by_a_short_step() -> None:
    machine = Machine(max_num_batched_tokens=5120, best_effort_step_s=0.2)
    machine.add(make_request("chat", 4, 100, arrival=machine.now, slo=Slo(tpot=3.0)))
    for _ in range(10):
        machine.step()
    before = len(machine.plans)
    machine.add(machine.batch("batch", 4000, 500.0))
    machine.until_done()
    steps = [
        seconds(StepShape.of(plan.rows))
        for plan in machine.plans[before:]
        if any(row.request_id == "batch" and row.num_tokens > 1 for row in plan.rows)
    ]
    # its own 11 ms, and 200 more in tiles of 16 tokens: the target would allow for 3 s
    assert 10 <= len(steps) <= 40
    assert max(steps) <= 0.011 + 0.2 + 0.001


def test_a_new_prompt_with_a_target_shares_its_step_with_no_best_effort_prompt() -> None:
    machine = Machine(max_num_batched_tokens=5120, best_effort_step_s=0.4)
    machine.add(machine.batch("batch", 4000, 500.0))
    machine.step()
    machine.add(make_request("chat", 80, 4, arrival=machine.now, slo=Slo(ttft=30.0)))
    before = len(machine.plans)
    machine.step()
    rows = {row.request_id: row.num_tokens for row in machine.plans[before].rows}
    assert rows == {"chat": 80}


def beside_others(until: float, deadline: float, num: int) -> tuple[int, int, int]:
    """Batch work that comes after 10 s, beside a prompt of 0.6 s every second until then; of it,
    how many are done in time, how many were left out, and how often."""
    machine = Machine(max_num_seqs=8)
    sent = 0
    ends: dict[str, float] = {}

    def step() -> None:
        nonlocal sent
        while sent <= machine.now and sent < until:
            machine.add(make_request(f"other{sent}", 600, 4, arrival=machine.now))
            sent += 1
        before = machine.now
        machine.step()
        if machine.now == before:
            machine.now += 0.01
        for request_id in machine.finished:
            ends.setdefault(request_id, machine.now)

    while machine.now < 10.0:
        step()
    due = machine.now + deadline
    # 0.6 s for the large, 0.1 s for the small
    machine.add(*(machine.batch(f"b{i}", 600 if i % 2 else 100, deadline) for i in range(num)))
    while machine.scheduler.has_unfinished:
        step()
    names = [f"b{i}" for i in range(num)]
    in_time = sum(ends[name] <= due for name in names)
    left_out = sum(demoted(machine, name) for name in names)
    return in_time, left_out, machine.scheduler.stats().num_demoted


def test_what_others_take_is_not_counted_on() -> None:
    # 14 s of work, 20 s until it is due, of which others take 12
    in_time, left_out, _ = beside_others(100.0, 20.0, 40)
    # 16 if the machine is taken to be theirs alone until it is certain that it is not
    assert in_time >= 25
    assert left_out == 40 - in_time


def test_who_was_left_out_comes_back_when_the_others_ebb() -> None:
    in_time, left_out, times = beside_others(14.0, 20.0, 40)
    assert times > 0, "others took too much"
    assert in_time == 40
    assert left_out < times


def test_what_others_take_now_is_not_held_against_work_that_is_due_much_later() -> None:
    # 43 s of work; with 60 % of the time taken there would be 44 s for it
    assert beside_others(40.0, 110.0, 120) == (120, 0, 0)
