"""Best-effort work under a steady stream of other work: it waits, but not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.pacing.ageing import Ageing
from paceline.core.pacing.view import RunningView
from paceline.core.policies import POLICIES
from paceline.core.queues.fair_queue import FairQueue
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from paceline.core.tenant_weights import TenantWeights
from paceline.core.tier import Tier
from tests.core.machine import Machine
from tests.driving import ask, make_request

# seconds after which best effort's turn comes, and in which a request of any stream here is done
DELAY = 4.0
ALONE = 10.0

# an ordinary request runs
BUSY = RunningView.of([make_request("other", 4)])

Stream = Callable[[Machine, int], list[Request]]


def small(machine: Machine, number: int) -> list[Request]:
    """Requests that can be on time, more than there is memory for."""
    missing = 8 - len(machine.scheduler._waiting.ordinary)
    # each of another tenant, that never asks again
    return [
        make_request(
            f"{number}.{i}",
            60,
            60,
            arrival=machine.now,
            priority=number % 2,
            slo=Slo(ttft=3000.0),
            tenant=f"{number}.{i}",
        )
        for i in range(missing)
    ]


def when_admitted(machine: Machine, number: int) -> list[Request]:
    """The same, as long as the door is open."""
    return [] if machine.scheduler.valve.level == 4 else small(machine, number)[:1]


def promised(machine: Machine, number: int) -> list[Request]:
    """Best-effort requests that have a deadline to keep, more than can run at once."""
    missing = 8 - len(machine.scheduler._waiting)
    return [
        make_request(
            f"{number}.{i}", 60, 2, arrival=machine.now, slo=Slo(best_effort=True, deadline=3000.0)
        )
        for i in range(missing)
    ]


def waited(machine: Machine, stream: Stream, *those: Request) -> float:
    """Seconds that ``those``, who come when the machine is busy, take beside a stream that does not
    end; infinity if they take more than three times as long as they may."""
    for number in range(30):
        machine.add(*stream(machine, number))
        machine.step()
    start = machine.now
    for request in those:
        ask(request, arrival_time=start)
        machine.add(request)
    while machine.now < start + 3 * len(those) * (10.0 + ALONE):
        machine.add(*stream(machine, len(machine.plans)))
        machine.step()
        if all(request.request_id in machine.finished for request in those):
            return machine.now - start
    return float("inf")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_large_late_request_gets_memory_beside_small_ones(policy: str) -> None:
    machine = Machine(policy=policy, num_blocks=200, max_num_seqs=64, best_effort_delay_s=DELAY)
    # its tenant was served before, unlike those of the stream
    machine.add(make_request("before", 700, 60, tenant="regular"))
    late = machine.late("late", 600)
    ask(late, tenant="regular")
    # its turn by the policy's order is to come too: shortest-first has it wait for 30 s more
    assert waited(machine, small, late) <= 60.0
    timeline = machine.finished["late"].timeline
    assert timeline is not None and timeline.relegated


def test_what_is_let_in_and_preempted_again_and_again_gets_on_in_the_end() -> None:
    machine = Machine(
        num_blocks=200,
        max_num_seqs=64,
        policy="fcfs",
        best_effort_delay_s=DELAY,
        pressure_threshold=0.5,
    )
    night = make_request("night", 400, 2, slo=Slo(best_effort=True))
    assert waited(machine, when_admitted, night) <= 25.0
    assert night.seconds_first < 11.0
    assert night.num_preemptions > 3, "the valve has opened often"


def test_background_work_gets_on_beside_work_with_deadlines() -> None:
    machine = Machine(best_effort_delay_s=DELAY)
    night = make_request("night", 60, 2, slo=Slo(best_effort=True))
    assert waited(machine, promised, night) <= 10.0 + ALONE


def test_they_get_on_one_after_another() -> None:
    machine = Machine(best_effort_delay_s=DELAY)
    night = [make_request(f"night{i}", 60, 2, slo=Slo(best_effort=True)) for i in range(3)]
    seconds = waited(machine, promised, *night)
    assert seconds <= 3 * (10.0 + ALONE)
    assert seconds >= 3 * 10.0, "no more than one at a time"
    ends = [name for name in machine.finished if name.startswith("night")]
    assert ends == ["night0", "night1", "night2"]


def test_background_work_that_runs_gets_rows_beside_prompts_in_every_step() -> None:
    machine = Machine(max_num_seqs=16, best_effort_delay_s=DELAY, background_share=0.1)
    night = make_request("night", 60, 20, slo=Slo(best_effort=True))
    machine.add(night)
    machine.step()

    def prompts(machine: Machine, number: int) -> list[Request]:
        missing = sum(r.num_uncomputed_tokens for r in machine.scheduler._running.requests)
        return [make_request(f"p{number}", 700, 2, arrival=machine.now)] if missing < 700 else []

    before = night.num_tokens
    for number in range(200):
        machine.add(*prompts(machine, number))
        machine.step()
        wide = [row for row in machine.plans[-1].rows if row.num_tokens > 1]
        assert wide, "a prompt in every step"
    assert 2 <= night.num_tokens - before <= 5


def urgent(machine: Machine, number: int) -> list[Request]:
    """Requests of priority 0, always some more than there are places."""
    missing = 8 - len(machine.scheduler._waiting.ordinary)
    return [make_request(f"{number}.{i}", 60, 20, arrival=machine.now) for i in range(missing)]


def test_what_nobody_would_ever_let_in_by_its_priority_gets_on_and_so_does_the_next() -> None:
    machine = Machine(policy="priority", best_effort_delay_s=DELAY)
    last = 2**63 - 1
    night = [
        make_request(f"night{i}", 60, 20, slo=Slo(best_effort=True), priority=last)
        for i in range(2)
    ]
    for each in night:
        # it has waited for nearly long enough
        each.seconds_first = 9.0
    assert waited(machine, urgent, *night) <= 2 * (1.0 + 5.0)


def test_one_that_became_ordinary_waits_for_nobody_who_comes_later() -> None:
    late = make_request("late", 4, slo=Slo(best_effort=True))
    room = room_with(late)
    late.order = (1e9, 0)
    room.remove(late)
    room.push(late)
    ageing = Ageing(room, 10.0)
    for now in (0.0, 20.0):
        # nobody waits yet whose place it could take
        ageing.look(now, BUSY)
    assert room.ordinary.peek() is late
    for number in (1, 2):
        newcomer = make_request(f"new{number}", 4)
        newcomer.order = (-float(number), number)
        room.push(newcomer)
        ageing.look(20.0 + number, BUSY)
        assert room.ordinary.peek() is late
    room.check_integrity()


def test_lines_alone_wait_their_turn_and_stay_what_they_are() -> None:
    """Two places, four lines of 1.8 s each; all have waited nine seconds for others before."""
    machine = Machine(max_num_seqs=2, best_effort_delay_s=DELAY, background_share=0.1)
    lines = [make_request(f"line{i}", 4, 150, slo=Slo(best_effort=True)) for i in range(4)]
    for line in lines:
        line.seconds_first = 9.0
    machine.add(*lines)
    ends = machine.until_done()
    assert all(line.best_effort for line in lines)
    # rows in every step until the end
    assert max(ends.values()) == pytest.approx(2 * 150 * 0.012, rel=0.02)


def test_a_line_held_up_by_a_tier_before_its_own_becomes_ordinary() -> None:
    night = make_request("night", 4, slo=Slo(best_effort=True))
    promised = make_request("promised", 4, slo=Slo(best_effort=True, deadline=3000.0))
    peer = make_request("peer", 4, slo=Slo(best_effort=True))
    for running, waiting, becomes in (
        ([peer], [], Tier.BACKGROUND),
        ([promised], [], Tier.ORDINARY),
        ([peer], [promised], Tier.ORDINARY),
    ):
        ask(night, slo=Slo(best_effort=True)).seconds_first = 0.0
        # who waits with a deadline comes later in the order
        ageing = Ageing(room_with(night, *waiting), 20.0)
        for now in (0.0, 15.0, 30.0):
            ageing.look(now, RunningView.of(running))
        assert night.tier is becomes


def room_with(*requests: Request) -> WaitingRoom:
    room = WaitingRoom(RequestQueue, lambda key: key, KVCacheManager(Machine().cache))
    for number, request in enumerate(requests):
        request.order = (0.0, number)
        room.push(request)
    return room


def test_only_time_at_the_head_counts_and_all_of_it() -> None:
    first, second = (make_request(f"r{i}", 4, slo=Slo(best_effort=True)) for i in range(2))
    room = room_with(first, second)
    ageing = Ageing(room, 20.0)
    ageing.look(0.0, BUSY)
    ageing.look(8.0, BUSY)
    # let in, and preempted
    room.remove(first)
    ageing.look(9.0, BUSY)
    ageing.look(18.0, BUSY)
    room.push(first)
    assert (first.seconds_first, second.seconds_first) == (8.0, 9.0)
    ageing.look(19.0, BUSY)
    ageing.look(30.0, BUSY)
    assert (first.tier, second.tier) == (Tier.BACKGROUND, Tier.BACKGROUND)
    ageing.look(31.0, BUSY)
    assert (first.tier, second.tier) == (Tier.ORDINARY, Tier.BACKGROUND)
    assert room.ordinary.peek() is first
    room.check_integrity()


def test_two_who_are_the_first_by_turns_do_not_wait_for_ever() -> None:
    """As under ``fair``: whose tenant's ordinary requests were served last comes second."""
    queues: list[FairQueue] = []

    def make_queue() -> FairQueue:
        queues.append(FairQueue(0.0, TenantWeights({})))
        return queues[-1]

    room = WaitingRoom(make_queue, lambda key: key, KVCacheManager(Machine().cache))
    night = [make_request(name, 4, tenant=name, slo=Slo(best_effort=True)) for name in "ab"]
    for number, request in enumerate(night):
        request.order = (0.0, number)
        room.push(request)
    ageing = Ageing(room, 20.0)
    firsts = []
    for second in range(50):
        ageing.look(float(second), BUSY)
        first = room.oldest_best_effort()
        if any(request.aged for request in night):
            break
        assert first is not None
        firsts.append(first.request_id)
        queues[first.tier].charge({first.asked.tenant: 10.0})
    assert firsts[:4] == ["a", "b", "a", "b"]
    # one of them was the first for half of the time
    assert 38 <= second <= 40
    room.check_integrity()


def test_nobody_else_becomes_ordinary_until_that_one_has_ended() -> None:
    first, second = (make_request(f"r{i}", 4, slo=Slo(best_effort=True)) for i in range(2))
    room = room_with(first, second)
    ageing = Ageing(room, 0.0)
    # a clock that goes backwards takes nothing away
    for now in (0.0, 5.0, 4.0, 9.0, 100.0):
        ageing.look(now, BUSY)
    assert first.tier is Tier.ORDINARY
    ageing.look(200.0, BUSY)
    assert second.seconds_first == 0.0
    room.remove(first)
    first.status = RequestStatus.FINISHED
    for now in (200.0, 205.0, 211.0):
        ageing.look(now, BUSY)
    assert second.tier is Tier.ORDINARY


def test_how_long_it_took_says_nothing_about_those_who_do_not_yield() -> None:
    machine = Machine(best_effort_delay_s=DELAY)
    night = make_request("night", 60, 2, slo=Slo(best_effort=True))
    night.seconds_first = 9.0
    assert waited(machine, promised, night) <= 10.0
    assert night.aged and night.history.predicted_ttft is not None
    kinds = machine.scheduler._door.forecast.outcomes
    assert Tier.ORDINARY not in {tier for tier, *_ in kinds}, "all others are best effort"


def test_a_queue_may_take_somebody_back_in_the_same_place() -> None:
    queue = RequestQueue()
    request = make_request("r", 4)
    queue.push(request)
    queue.remove(request)
    queue.push(request)
    queue.check_integrity()
    assert (queue.pop(), queue.pop(), len(queue)) == (request, None, 0)
