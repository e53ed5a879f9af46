"""Requests that wait and have targets: when they are due, as they come and go."""

from __future__ import annotations

from paceline.core.pacing.waiting_targets import WaitingTargets
from paceline.core.slo import Slo
from paceline.core.tier import Move
from tests.core.parts import numbered, parts


def test_first_tokens_that_are_due_are_known_by_group_and_by_time() -> None:
    state = parts(policy="fair")
    room, targets = state.waiting, WaitingTargets(state)
    asks = (("a", 0, "x", 5.0), ("b", 1, "y", 1.0), ("c", 2, "x", 3.0))
    requests = [
        numbered(name, number, 4, tenant=tenant, slo=Slo(ttft=ttft), arrival=float(number))
        for name, number, tenant, ttft in asks
    ]
    changes = targets.num_changes
    for request in reversed(requests):
        room.push(request)
    assert targets.dues == [2.0, 5.0, 5.0]
    assert {g: [r.request_id for r in own] for g, own in targets.targeted.items()} == {
        "x": ["a", "c"],
        "y": ["b"],
    }
    room.remove(requests[1])
    assert targets.dues == [5.0, 5.0] and set(targets.targeted) == {"x"}
    assert targets.num_changes == changes + 4
    room.remove(requests[0])
    room.remove(requests[2])
    assert not targets.dues and not targets.targeted
    # who was started before, and best effort, has no first token that is due
    started = numbered("s", 3, 4, slo=Slo(ttft=1.0))
    started.first_scheduled_time = 0.0
    room.push(started)
    room.push(numbered("n", 4, 4, slo=Slo(ttft=1.0, best_effort=True)))
    assert not targets.dues
    targets.check_integrity()


def test_deadline_batches_are_known_by_their_deadlines() -> None:
    requests = [
        numbered(f"r{i}", i, 4, slo=Slo(best_effort=True, deadline=deadline), arrival=1.0)
        for i, deadline in enumerate((30.0, 10.0, 20.0))
    ]
    state = parts()
    room, targets = state.waiting, WaitingTargets(state)
    for request in requests:
        room.push(request)
    assert [(due, request.request_id) for due, _, request in targets.deadline_batch] == [
        (11.0, "r1"),
        (21.0, "r2"),
        (31.0, "r0"),
    ]
    room.move(requests[1], lambda request: request.move(Move.DEMOTE))
    assert [request.request_id for _, _, request in targets.deadline_batch] == ["r2", "r0"]
    targets.check_integrity()


def test_who_asks_for_nothing_is_not_told_of() -> None:
    """Steps without targets, which are told of none, pay nothing for this."""
    state = parts()
    told: list[tuple[str, int]] = []
    state.waiting.on_change = lambda request, more: told.append((request.request_id, more))
    members = [
        numbered("plain", 0, 4),
        numbered("named", 1, 4, slo=Slo(slo_class="standard")),
        numbered("first", 2, 4, slo=Slo(ttft=1.0)),
        numbered("last", 3, 4, slo=Slo(deadline=9.0, best_effort=True)),
    ]
    for request in members:
        state.waiting.push(request)
    for request in members:
        state.waiting.remove(request)
    assert told == [("first", 1), ("last", 1), ("first", -1), ("last", -1)]
