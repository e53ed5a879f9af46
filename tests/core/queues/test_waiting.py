"""Requests that wait: places, sums over them, and what they waited for."""

from __future__ import annotations

import random

import pytest

from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.core.tier import Move, Tier
from tests.core.parts import numbered, parts

NIGHT = Slo(best_effort=True)
PROMISE = Slo(best_effort=True, deadline=60.0)


def room_of(*requests: Request, policy: str = "fcfs") -> WaitingRoom:
    room = parts(policy=policy).waiting
    for request in requests:
        room.push(request)
    room.check_integrity()
    return room


def relegated(request: Request) -> Request:
    request.move(Move.DEMOTE)
    assert request.tier is Tier.RELEGATED
    return request


def test_tiers_wait_apart_and_are_served_in_turn() -> None:
    room = room_of(
        numbered("night", 0, 4, slo=NIGHT),
        numbered("promise", 1, 4, slo=PROMISE),
        numbered("late", 3, 4),
        numbered("early", 2, 4),
    )
    names = []
    while (head := room.first(pressing=False)) is not None:
        names.append(head.request_id)
        room.take(head)
        room.check_integrity()
    assert names == ["early", "late", "promise", "night"]
    assert not room and not any(room.num_tokens)


def test_only_the_first_of_a_tier_can_be_taken() -> None:
    early, late = numbered("early", 0, 4), numbered("late", 1, 4)
    room = room_of(late, early)
    assert early in room and late in room
    with pytest.raises(AssertionError, match="another request came first"):
        room.take(late)


def test_a_missed_target_comes_before_promises_by_order_unless_deadlines_press() -> None:
    missed = relegated(numbered("missed", 0, 4, slo=PROMISE))
    promise = numbered("promise", 1, 4, slo=PROMISE)
    room = room_of(promise, missed)
    later = room_of(promise, missed, policy="deadline")
    assert room.peek_best_effort(pressing=False) is missed
    assert later.peek_best_effort(pressing=False) is missed
    assert later.peek_best_effort(pressing=True) is promise
    assert list(room.best_effort_heads()) == [promise, missed]
    assert room.num_tokens[Tier.PROMISED] and not room.num_tokens[Tier.ORDINARY]


def test_sums_follow_those_that_come_go_and_move() -> None:
    favoured = numbered("favoured", 0, 10)
    favoured.favoured = True
    plain, night = numbered("plain", 1, 7), numbered("night", 2, 5, slo=NIGHT)
    room = room_of(favoured, plain, night)
    assert (len(room), room.num_tokens[0], sum(room.num_tokens)) == (3, 17, 22)
    newcomer = numbered("new", 9, 1)
    assert room.ahead_of(newcomer, newcomer.tier) == (2, 17)
    newcomer.favoured = True
    assert room.ahead_of(newcomer, newcomer.tier) == (1, 10), (
        "before a favoured one only favoured ones"
    )
    background = numbered("background", 9, 1, slo=NIGHT)
    assert room.ahead_of(background, background.tier) == (3, 22)
    room.remove(favoured)
    assert (len(room), room.num_tokens[0], sum(room.num_tokens)) == (2, 7, 12)
    room.move(plain, relegated)
    assert plain in room and room.num_tokens[0] == 0 and sum(room.num_tokens) == 12
    room.check_integrity()


def test_a_move_that_fails_leaves_the_member_where_it_was() -> None:
    request = numbered("a", 0, 4)
    room = room_of(request)

    def fails(_: Request) -> None:
        raise ValueError("no such move")

    with pytest.raises(ValueError, match="no such move"):
        room.move(request, fails)
    assert request in room
    room.check_integrity()


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
    room = parts().waiting
    request = numbered("a", 0, 4, arrival=1.0)
    room.arrive(request)
    room.begin_plan(2.0)
    room.clocks.note(Reason.SLOTS, 2.0)
    room.begin_plan(5.0)
    room.clocks.note(Reason.SLOTS, 5.0)
    room.take(request)
    room.leave(request, 5.0)
    waits = request.history.waits
    assert waits[Reason.SLOTS] == 3.0 and sum(waits) == 4.0, "until the first plan: for that"
    room.enter(request, 6.0)
    room.clocks.note(Reason.MEMORY, 6.0)
    room.begin_plan(8.0)
    room.clocks.note(Reason.MEMORY, 8.0)
    room.take(request)
    room.leave(request, 8.0)
    again = request.history.waits
    assert again[Reason.SLOTS] > 3.0 and again[Reason.MEMORY] > 0.0
    assert sum(again) == pytest.approx(6.0)


def test_who_arrives_after_a_rest_is_not_charged_for_it() -> None:
    room = parts().waiting
    room.clocks.note(Reason.POLICY, 0.0)
    room.rest()
    request = numbered("a", 0, 4, arrival=100.0)
    room.arrive(request)
    room.begin_plan(101.0)
    room.take(request)
    room.leave(request, 101.0)
    assert sum(request.history.waits) == 1.0 and request.history.waits[Reason.POLICY] == 0.0
    assert not any(room.clocks.reading()), "nor is anybody else"


@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline"])
def test_sums_and_places_hold_whatever_happens(policy: str) -> None:
    rng = random.Random(7)
    room = parts(policy=policy).waiting
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
            room.arrive(request)
            members[request.request_id] = request
        elif members:
            request = rng.choice(list(members.values()))
            if rng.random() < 0.4 and request.tier in (Tier.ORDINARY, Tier.PROMISED):
                room.move(request, relegated)
            else:
                room.remove(members.pop(request.request_id))
        room.check_integrity()
        assert {r.request_id for r in room} == set(members)
    assert members
