"""Best-effort work that streams and is due soon: a row in every step, as far as others allow."""

from __future__ import annotations

import pytest

from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request
from paceline.core.slo import NO_SLO, Slo
from tests.core.machine import Machine, seconds
from tests.core.test_forgetting import reachable_requests
from tests.driving import ask, make_request

NUM_TOKENS = 40


def batch(
    machine: Machine, name: str, deadline: float, prompt: int = 20, output: int = NUM_TOKENS
) -> Request:
    """Batch work whose length is known."""
    slo = Slo(slo_class="batch", best_effort=True, deadline=deadline)
    request = make_request(name, prompt, output, arrival=machine.now, slo=slo)
    for _ in range(8):
        machine.scheduler.lengths.observe(request.label, output)
    machine.add(request)
    return request


def streaming(machine: Machine, num: int, deadline: float) -> list[Request]:
    """So many, whose prompts are computed."""
    requests = [batch(machine, f"batch{i}", deadline) for i in range(num)]
    while any(request.first_token_time is None for request in requests):
        machine.step()
    return requests


def running(machine: Machine, num: int, deadline: float, output: int) -> None:
    """So many, let in."""
    for index in range(num):
        batch(machine, f"batch{index}", deadline, output=output)
    while len(machine.scheduler._running.requests) < num:
        machine.step()


def hurried(machine: Machine) -> set[str]:
    """Who would be in the next step, but for what the next look at deadlines says."""
    scheduler = machine.scheduler
    view = RunningView.of(scheduler._running.requests)
    return {request.request_id for request in scheduler._paced._deadlines.must_run(view)}


def until_hurried(machine: Machine) -> None:
    """Steps until somebody is."""
    while not hurried(machine):
        machine.step()


class Prompts:
    """Ordinary prompts that come every so many seconds from now on."""

    def __init__(self, machine: Machine, every: float, num_tokens: int, ttft: float = 30.0) -> None:
        self._machine = machine
        self._began = machine.now
        self._every = every
        self._num_tokens = num_tokens
        self._slo = Slo(ttft=ttft)
        self._sent = 0

    def step(self) -> int:
        """A step, after those that are due have come. Returns how many are in a hurry."""
        machine = self._machine
        while self._began + self._every * self._sent <= machine.now:
            name, arrival = f"other{self._sent}", machine.now
            machine.add(make_request(name, self._num_tokens, 2, arrival=arrival, slo=self._slo))
            self._sent += 1
        machine.step()
        return len(hurried(machine))


def beside_prompts(every: float, deadline: float) -> tuple[float, list[bool], bool]:
    """When batch work is done beside a prompt of 0.6 s every so many; of each step until then,
    whether it had a row; and whether it was ever in a hurry."""
    # without a share of its own, which would pay for a row in every step
    machine = Machine(best_effort_share=0.0)
    streaming(machine, 1, deadline)
    planned, prompts, most = len(machine.plans), Prompts(machine, every, 600), 0
    while "batch0" not in machine.finished:
        most = max(most, prompts.step())
    rows = [{row.request_id for row in plan.rows} for plan in machine.plans[planned:]]
    return machine.now, ["batch0" in names for names in rows], most > 0


def test_what_is_due_soon_has_a_row_in_every_step() -> None:
    # no step has room for it; if it sat out as many as it may, it would take 160 s
    end, rows, ever = beside_prompts(0.5, 25.0)
    assert ever
    assert end <= 25.0
    assert all(rows[rows.index(True) :])


def test_what_is_due_later_makes_way() -> None:
    end, rows, ever = beside_prompts(0.65, 80.0)
    assert not ever
    assert end <= 80.0
    assert sum(rows) < 0.7 * len(rows), "prompts come first"


def chat_beside(machine: Machine) -> Request:
    """A chat with a pace of 20 ms, to whom a step of its own takes 11."""
    chat = make_request("chat", 4, 400, arrival=machine.now, slo=Slo(tpot=0.02))
    machine.add(chat)
    while chat.first_token_time is None:
        machine.step()
    # the driver's clock says a second later: it would have that to spare
    chat.first_token_time = machine.now
    return chat


def tpot(machine: Machine, chat: Request) -> float:
    assert chat.first_token_time is not None
    return (machine.now - chat.first_token_time) / (len(chat.output_token_ids) - 1)


def test_the_pace_of_others_comes_first() -> None:
    machine = Machine(max_num_seqs=32)
    # twenty rows take 20 ms
    streaming(machine, 20, 4.0)
    chat = chat_beside(machine)
    most = 0
    for _ in range(60):
        machine.step()
        most = max(most, len(hurried(machine)))
        if len(chat.output_token_ids) >= 8:
            assert tpot(machine, chat) <= 0.02
    # a quarter of what 18 ms leave beside its own 11
    assert most == 1
    slower = Machine(max_num_seqs=32)
    streaming(slower, 20, 4.0)
    ask(chat_beside(slower), slo=Slo(tpot=0.06))
    for _ in range(8):
        slower.step()
    assert 8 <= len(hurried(slower)) <= 11, "of 54 ms"


def test_a_pace_that_nobody_could_keep_is_no_reason_to_wait() -> None:
    machine = Machine(max_num_seqs=32)
    streaming(machine, 20, 4.0)
    # a step of its own takes 11 ms
    absurd = chat_beside(machine)
    ask(absurd, slo=Slo(tpot=0.001))
    for _ in range(8):
        machine.step()
    assert len(hurried(machine)) == 20
    chat = make_request("other", 4, 400, arrival=machine.now, slo=Slo(tpot=0.06))
    machine.add(chat)
    while chat.first_token_time is None:
        machine.step()
    for _ in range(8):
        machine.step()
    assert 8 <= len(hurried(machine)) <= 11, "and whose can be kept is kept"


def test_it_leaves_most_of_what_the_pace_of_others_leaves_to_their_prompts() -> None:
    machine = Machine(max_num_seqs=128)
    running(machine, 60, 14.0, output=100)
    chat = chat_beside(machine)
    ask(chat, slo=Slo(tpot=0.06))
    # two thirds of the machine's time
    prompts, ends, most = Prompts(machine, 0.3, 200, ttft=1.0), machine.now + 6.0, 0
    while machine.now < ends:
        most = max(most, prompts.step())
    assert most >= 8
    assert tpot(machine, chat) <= 0.061


def test_a_prompt_is_in_no_hurry() -> None:
    machine = Machine(max_num_seqs=64)
    running(machine, 40, 50_000.0, output=400)
    chat = chat_beside(machine)
    soon = batch(machine, "soon", 25.0, prompt=3000)
    while soon.num_uncomputed_tokens > 1 and not soon.history.demoted:
        machine.step()
        assert "soon" not in hurried(machine) or soon.num_uncomputed_tokens <= 1
        if "soon" not in {row.request_id for row in machine.plans[-1].rows}:
            # rows of its own tier are given for having sat out eight steps, 16 at most
            assert len(machine.plans[-1].rows) <= 1 + 7 + 16
    assert tpot(machine, chat) <= 0.03


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("budget", [32, 64])
def test_no_step_has_more_tokens_than_it_may(adaptive: bool, budget: int) -> None:
    machine = Machine(
        max_num_seqs=16, max_num_batched_tokens=budget, adaptive_token_budget=adaptive
    )
    streaming(machine, 8, 2.0)
    while len(hurried(machine)) < 8:
        machine.step()
    machine.add(make_request("other", 600, 2, arrival=machine.now, slo=Slo(ttft=30.0)))
    # the driver looks at every plan
    while "other" not in machine.finished:
        machine.step()
        names = {row.request_id for row in machine.plans[-1].rows}
        assert {name for name in hurried(machine) if name in names} == hurried(machine)
    machine.until_done()


def test_a_step_is_no_longer_than_best_effort_may_make_it() -> None:
    machine = Machine(max_num_seqs=128, best_effort_step_s=0.1, max_num_batched_tokens=2000)
    streaming(machine, 70, 8.0)
    machine.add(make_request("chat", 4, 200, arrival=machine.now, slo=NO_SLO))
    batch(machine, "large", 50_000.0, prompt=6000, output=2)
    machine.step()
    most = 0
    for _ in range(40):
        machine.step()
        most = max(most, len(hurried(machine)))
        # the chat's 11 ms and 100 more
        assert seconds(StepShape.of(machine.plans[-1].rows)) <= 0.111 + 1e-9
    assert most > 10


def test_no_more_are_in_a_hurry_than_a_step_of_best_effort_may_have() -> None:
    machine = Machine(max_num_seqs=64, best_effort_step_s=0.4)
    streaming(machine, 40, 8.0)
    for _ in range(8):
        machine.step()
    assert len(hurried(machine)) >= 30
    machine.scheduler._paced.budget._best_effort_step_s = 0.03
    assert len(hurried(machine)) == 20


def test_what_rows_have_before_them_counts() -> None:
    # 21 ms each, of which 20 are for that
    machine = Machine(max_num_seqs=16, per_key=1e-5, best_effort_step_s=0.4)
    requests = [batch(machine, f"batch{i}", 38.0, prompt=2000, output=80) for i in range(8)]
    while any(request.first_token_time is None for request in requests):
        machine.step()
    while len(hurried(machine)) < 7:
        assert not machine.finished
        machine.step()
    machine.scheduler._paced.budget._best_effort_step_s = 0.1
    assert 3 <= len(hurried(machine)) <= 5


def test_rows_of_others_that_take_longer_than_best_effort_may_leave_it_as_much() -> None:
    machine = Machine(max_num_seqs=64, best_effort_step_s=0.05, best_effort_share=0.0)
    # with a step of their own 55 ms
    for index in range(45):
        slo = Slo(tpot=0.5)
        machine.add(make_request(f"chat{index}", 4, 4000, arrival=machine.now, slo=slo))
    (request,) = streaming(machine, 1, 14.0)
    prompts, most = Prompts(machine, 0.3, 200), 0
    while request.request_id not in machine.finished:
        most = max(most, prompts.step())
    assert most == 1
    assert machine.now <= 14.0 and not request.history.demoted


def test_both_limits_hold_at_once() -> None:
    machine = Machine(max_num_seqs=64, best_effort_step_s=0.4)
    streaming(machine, 40, 8.0)
    ask(chat_beside(machine), slo=Slo(tpot=10.0))
    for _ in range(8):
        machine.step()
    assert len(hurried(machine)) > 30
    machine.scheduler._paced.budget._best_effort_step_s = 0.03
    assert len(hurried(machine)) == 30, "41 ms, of which 11 are the chat's"
    chat = machine.scheduler._running.requests[0]
    assert chat.request_id == "chat"
    ask(chat, slo=Slo(tpot=0.06))
    assert 8 <= len(hurried(machine)) <= 11


def test_it_keeps_its_row_where_another_is_displaced() -> None:
    machine = Machine(max_num_seqs=2, policy="priority")
    (request,) = streaming(machine, 1, 2.0)
    until_hurried(machine)
    line = make_request("line", 4, 50, arrival=machine.now, slo=Slo(best_effort=True))
    machine.add(line)
    machine.step()
    # takes its place, and a step in which there is no room for best effort
    machine.add(make_request("other", 600, 2, arrival=machine.now, slo=Slo(ttft=30.0)))
    machine.step()
    assert line.num_preemptions == 1 and request.num_preemptions == 0
    assert {row.request_id for row in machine.plans[-1].rows} == {"other", "batch0"}


def test_where_one_in_a_hurry_makes_way_no_room_is_kept_for_it() -> None:
    machine = Machine(
        max_num_seqs=8,
        num_blocks=60,
        max_num_batched_tokens=32,
        pressure_threshold=0.6,
        adaptive_token_budget=False,
    )
    (request,) = streaming(machine, 1, 1.0)
    until_hurried(machine)
    machine.add(make_request("other", 180, 8, arrival=machine.now, slo=Slo(ttft=30.0)))
    while not request.num_preemptions:
        machine.step()
    assert machine.plans[-1].num_tokens == 32


def test_where_one_made_way_for_one_in_a_hurry_nobody_is_let_in_in_that_step() -> None:
    # 4 blocks for one of them in the end, 10 or 11 for the other
    machine = Machine(num_blocks=13, block_size=16, future_memory_check=False)
    slo = Slo(slo_class="batch", best_effort=True)
    large = make_request("large", 130, NUM_TOKENS, arrival=machine.now, slo=slo)
    machine.add(large)
    machine.step()
    streaming(machine, 1, 1.0)
    while machine.scheduler.kv.pool.num_free:
        machine.step()
    assert hurried(machine) == {"batch0"}
    machine.add(make_request("small", 20, 2, arrival=machine.now, slo=slo))
    names: list[str] = []
    while not large.num_preemptions:
        assert "small" not in names and "batch0" not in machine.finished
        machine.step()
        names = [row.request_id for row in machine.plans[-1].rows]
    assert names == ["batch0"]
    machine.step()
    assert [row.request_id for row in machine.plans[-1].rows] == ["batch0", "small"]


def test_who_has_aged_meanwhile_is_counted_once() -> None:
    machine = Machine()
    (request,) = streaming(machine, 1, 1.0)
    until_hurried(machine)
    ask(request, slo=NO_SLO)
    assert not hurried(machine)


def test_nobody_is_kept_in_memory() -> None:
    machine = Machine()
    streaming(machine, 1, 1.0)
    until_hurried(machine)
    machine.until_done()
    machine.step()
    assert not reachable_requests(machine.scheduler)


def test_for_want_of_memory_others_of_best_effort_make_way_first() -> None:
    machine = Machine(max_num_seqs=8, num_blocks=60, pressure_threshold=1.0)
    soon = batch(machine, "soon", 6.0, prompt=40, output=60)
    lazy = [batch(machine, f"lazy{i}", 50_000.0, prompt=40, output=60) for i in range(3)]
    machine.until_done()
    for plan in machine.plans:
        # whoever made way does not come back in the same step
        assert not set(plan.released) & {new.request_id for new in plan.new_requests}
    assert soon.num_preemptions == 0
    assert sum(request.num_preemptions for request in lazy) > 0


def test_when_memory_is_nearly_full_one_in_a_hurry_goes_if_nobody_else_can() -> None:
    machine = Machine(max_num_seqs=8, num_blocks=44, pressure_threshold=0.5)
    machine.add(make_request("chat", 60, 100, arrival=machine.now, slo=NO_SLO))
    (request,) = streaming(machine, 1, 1.5)
    until_hurried(machine)
    ends = machine.until_done()
    assert request.num_preemptions > 0, "the valve opens"
    assert set(ends) == {"chat", "batch0"}


def test_it_is_not_taken_for_the_work_of_others() -> None:
    machine = Machine(max_num_seqs=8)
    streaming(machine, 6, 1.0)
    for _ in range(10):
        machine.step()
    steps = machine.scheduler._steps
    assert hurried(machine)
    assert steps._ordinary_seconds == 0.0
    machine.add(make_request("chat", 4, 100, arrival=machine.now, slo=NO_SLO))
    before, since = steps._ordinary_seconds, machine.now
    for _ in range(10):
        machine.step()
    # 11 ms of 17
    assert 0.6 <= (steps._ordinary_seconds - before) / (machine.now - since) <= 0.75


def test_who_waits_behind_it_is_held_up() -> None:
    machine = Machine(max_num_seqs=1)
    streaming(machine, 1, 1.0)
    until_hurried(machine)
    night = make_request("night", 20, 2, arrival=machine.now, slo=Slo(best_effort=True))
    machine.add(night)
    for _ in range(4):
        machine.step()
    assert night.first_scheduled_time is None


def test_who_is_left_out_is_in_no_hurry_any_more() -> None:
    machine = Machine()
    (request,) = streaming(machine, 1, 1.0)
    until_hurried(machine)
    ask(request, slo=Slo(slo_class="batch", best_effort=True, deadline=0.05))
    while not request.history.demoted:
        assert request.finish_reason is None
        machine.step()
    assert not hurried(machine)
    machine.until_done()
