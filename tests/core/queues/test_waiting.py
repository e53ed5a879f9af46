"""Requests that wait: places, sums over them, and what they waited for."""

from __future__ import annotations

import random

import pytest

from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingQueues
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.core.tier import Move, Tier
from tests.core.machine import Machine
from tests.core.parts import numbered, parts
from tests.driving import make_request

NIGHT = Slo(best_effort=True)
PROMISE = Slo(best_effort=True, deadline=60.0)


def queues_of(*requests: Request, policy: str = "fcfs") -> WaitingQueues:
    queues = parts(policy=policy).waiting
    for request in requests:
        queues.push(request)
    queues.check_integrity()
    return queues


def demoted(request: Request) -> Request:
    request.move(Move.DEMOTE)
    assert request.tier is Tier.DEMOTED
    return request


def test_tiers_wait_apart_and_are_served_in_turn() -> None:
    queues = queues_of(
        numbered("night", 0, 4, slo=NIGHT),
        numbered("promise", 1, 4, slo=PROMISE),
        numbered("late", 3, 4),
        numbered("early", 2, 4),
    )
    names = []
    while (head := queues.first(pressing=False)) is not None:
        names.append(head.request_id)
        queues.take(head)
        queues.check_integrity()
    assert names == ["early", "late", "promise", "night"]
    assert not queues and not any(queues.num_tokens)


def test_only_the_first_of_a_tier_can_be_taken() -> None:
    early, late = numbered("early", 0, 4), numbered("late", 1, 4)
    queues = queues_of(late, early)
    assert early in queues and late in queues
    with pytest.raises(AssertionError, match="another request came first"):
        queues.take(late)


def test_a_missed_target_comes_before_deadlines_by_order_unless_deadlines_press() -> None:
    missed = demoted(numbered("missed", 0, 4, slo=PROMISE))
    promise = numbered("promise", 1, 4, slo=PROMISE)
    queues = queues_of(promise, missed)
    later = queues_of(promise, missed, policy="deadline")
    assert queues.peek_best_effort(pressing=False) is missed
    assert later.peek_best_effort(pressing=False) is missed
    assert later.peek_best_effort(pressing=True) is promise
    assert list(queues.best_effort_heads()) == [promise, missed]
    assert queues.num_tokens[Tier.DEADLINE_BATCH] and not queues.num_tokens[Tier.ORDINARY]


def test_best_effort_with_targets_counts_what_order_puts_first() -> None:
    first, last = numbered("first", 1, 4, slo=PROMISE), numbered("last", 8, 5, slo=PROMISE)
    missed, lost = demoted(numbered("missed", 2, 6)), demoted(numbered("lost", 9, 7))
    newcomer = numbered("new", 5, 1, slo=PROMISE)
    for policy in ("fcfs", "deadline"):
        queues = queues_of(numbered("chat", 9, 3), first, last, missed, lost, policy=policy)
        # in a tier half of the members have half of the tokens
        assert queues.ahead_of(newcomer, newcomer.tier) == (3, 3 + 4 + 6)
        background = numbered("background", 0, 1, slo=NIGHT)
        assert queues.ahead_of(background, background.tier) == (5, 3 + 9 + 13)


def test_sums_follow_those_that_come_go_and_move() -> None:
    boosted = numbered("boosted", 0, 10)
    boosted.boosted = True
    plain, night = numbered("plain", 1, 7), numbered("night", 2, 5, slo=NIGHT)
    queues = queues_of(boosted, plain, night)
    assert (len(queues), queues.num_tokens[0], sum(queues.num_tokens)) == (3, 17, 22)
    newcomer = numbered("new", 9, 1)
    assert queues.ahead_of(newcomer, newcomer.tier) == (2, 17)
    newcomer.boosted = True
    assert queues.ahead_of(newcomer, newcomer.tier) == (1, 10), (
        "before a boosted one only boosted ones"
    )
    background = numbered("background", 9, 1, slo=NIGHT)
    assert queues.ahead_of(background, background.tier) == (3, 22)
    queues.remove(boosted)
    assert (len(queues), queues.num_tokens[0], sum(queues.num_tokens)) == (2, 7, 12)
    queues.move(plain, demoted)
    assert plain in queues and queues.num_tokens[0] == 0 and sum(queues.num_tokens) == 12
    queues.check_integrity()


def test_a_move_that_fails_leaves_the_member_where_it_was() -> None:
    request = numbered("a", 0, 4)
    queues = queues_of(request)

    def fails(_: Request) -> None:
        raise ValueError("no such move")

    with pytest.raises(ValueError, match="no such move"):
        queues.move(request, fails)
    assert request in queues
    queues.check_integrity()


def test_members_that_hold_blocks_give_all_of_them_back_at_once() -> None:
    state = parts()
    fork = numbered("fork", 0, 9)
    assert state.kv.admit(fork, beside_others=False)
    state.waiting.push(fork)
    state.waiting.push(numbered("other", 1, 9))
    free = state.kv.pool.num_free
    assert state.waiting.drop_blocks()
    assert not fork.block_ids and state.kv.pool.num_free == free + 3
    assert not state.waiting.drop_blocks(), "there are none left"
    state.waiting.check_integrity()


def test_waits_are_added_up_over_all_times_a_request_waited() -> None:
    queues = parts().waiting
    request = numbered("a", 0, 4, arrival=1.0)
    queues.arrive(request)
    queues.begin_plan(2.0)
    queues.clocks.note(Reason.SLOTS, 2.0)
    queues.begin_plan(5.0)
    queues.clocks.note(Reason.SLOTS, 5.0)
    queues.take(request)
    queues.leave(request, 5.0)
    waits = request.history.waits
    assert waits[Reason.SLOTS] == 3.0 and sum(waits) == 4.0, "until the first plan: for that"
    queues.enter(request, 6.0)
    queues.clocks.note(Reason.MEMORY, 6.0)
    queues.begin_plan(8.0)
    queues.clocks.note(Reason.MEMORY, 8.0)
    queues.take(request)
    queues.leave(request, 8.0)
    again = request.history.waits
    assert again[Reason.SLOTS] > 3.0 and again[Reason.MEMORY] > 0.0
    assert sum(again) == pytest.approx(6.0)


def test_who_arrives_after_a_rest_is_not_charged_for_it() -> None:
    queues = parts().waiting
    queues.clocks.note(Reason.POLICY, 0.0)
    queues.rest()
    request = numbered("a", 0, 4, arrival=100.0)
    queues.arrive(request)
    queues.begin_plan(101.0)
    queues.take(request)
    queues.leave(request, 101.0)
    assert sum(request.history.waits) == 1.0 and request.history.waits[Reason.POLICY] == 0.0
    assert not any(queues.clocks.reading()), "nor is anybody else"


@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline"])
def test_sums_and_places_hold_whatever_happens(policy: str) -> None:
    rng = random.Random(7)
    queues = parts(policy=policy).waiting
    members: dict[str, Request] = {}
    slos = (Slo(), Slo(ttft=2.0), PROMISE, NIGHT, Slo(best_effort=True, ttft=3.0))
    for number in range(300):
        if rng.random() < 0.6:
            request = numbered(
                f"r{number}",
                number,
                rng.randint(1, 30),
                slo=rng.choice(slos),
                tenant=rng.choice("xyz"),
                arrival=float(number),
            )
            queues.arrive(request)
            members[request.request_id] = request
        elif members:
            request = rng.choice(list(members.values()))
            if rng.random() < 0.4 and request.tier in (Tier.ORDINARY, Tier.DEADLINE_BATCH):
                queues.move(request, demoted)
            else:
                queues.remove(members.pop(request.request_id))
        queues.check_integrity()
        assert {r.request_id for r in queues} == set(members)
    assert members


def test_late_requests_that_never_began_go_newest_first_where_their_wait_is_bounded() -> None:
    for timeout, order in ((60.0, ["new", "middle", "old"]), (None, ["old", "middle", "new"])):
        machine = Machine(max_num_seqs=1, policy="deadline", queue_timeout_s=timeout)
        machine.add(make_request("runs", 5, 200, arrival=machine.now))
        machine.step()
        for name, before in (("old", 3.0), ("middle", 2.0), ("new", 1.0)):
            # none can be on time, and those that can be come first
            slo, arrival = Slo(ttft=0.5), machine.now - before
            machine.add(make_request(name, 5, 4, arrival=arrival, slo=slo))
        machine.add(make_request("on time", 5, 4, arrival=machine.now, slo=Slo(ttft=30.0)))
        served: list[str] = []
        while machine.scheduler.has_unfinished:
            machine.step()
            served += [row.request_id for row in machine.plans[-1].rows]
        assert [name for name in dict.fromkeys(served) if name in order] == order, timeout


def test_the_oldest_late_request_rejoins_first_although_the_newest_is_served_first() -> None:
    machine = Machine(max_num_seqs=1, policy="deadline", queue_timeout_s=60.0)
    machine.add(make_request("runs", 5, 40, arrival=machine.now))
    machine.step()
    for name, before in (("old", 3.0), ("new", 1.0)):
        arrival = machine.now - before
        machine.add(make_request(name, 5, 4, arrival=arrival, slo=Slo(ttft=0.5)))
    machine.add(make_request("on time", 5, 4, arrival=machine.now, slo=Slo(ttft=30.0)))
    served: list[str] = []
    while machine.scheduler.has_unfinished:
        machine.step()
        served += [row.request_id for row in machine.plans[-1].rows]
        if served.count("on time") == 1:
            # once the target is met, late requests endanger none: they go before what came later
            machine.add(make_request("plain", 5, 4, arrival=machine.now))
    assert machine.scheduler.state.totals.num_demoted == 2
    assert list(dict.fromkeys(served)) == ["runs", "on time", "old", "new", "plain"]
