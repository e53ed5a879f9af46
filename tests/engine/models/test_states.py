"""Models as values: leases, room, making way, failures; and a random machine over all of it."""

from __future__ import annotations

import contextlib
import math
import random

import pytest

from paceline.engine.models.ledger import Account
from paceline.engine.models.model import Model, ModelSpec, State, Ticket
from paceline.engine.models.states import Load, ModelStates, Unload
from paceline.errors import (
    ModelFailedError,
    ModelRoomError,
    QueueFullError,
    UnknownModelError,
)


def _spec(name: str, size: int = 10, **more: object) -> ModelSpec:
    return ModelSpec(name=name, account=Account(weights=size), **more)  # type: ignore[arg-type]


def _is_granted(ticket: Ticket) -> bool:
    return ticket.is_granted


def _load(states: ModelStates, name: str, now: float, seconds: float = 0.5) -> None:
    """Load a model for a request that ends at once."""
    ticket = states.ask(name, now)
    while not ticket.is_granted:
        action = states.next(now)
        assert action is not None, states.models
        if isinstance(action, Load):
            states.loaded_as(action.model, action.model.account, seconds, now)
        else:
            states.unloaded(action.model, action.reason)
    states.leave(ticket, now)


def test_a_request_waits_for_the_load_and_holds_a_lease() -> None:
    states = ModelStates([_spec("a")], 10)
    ticket = states.ask("a", 0.0)
    assert not _is_granted(ticket)
    action = states.next(0.0)
    assert isinstance(action, Load) and action.model.state is State.LOADING
    assert states.next(0.0) is None, "one load at a time"
    second = states.ask("a", 0.1)
    assert states.loaded_as(action.model, Account(weights=9), 0.5, 0.5)
    assert _is_granted(ticket) and second.is_granted and len(action.model.leases) == 2
    assert states.ledger.free == 1
    assert states.ask("a", 1.0).is_granted


def test_an_idle_model_makes_room_and_one_in_use_does_not_at_once() -> None:
    states = ModelStates([_spec("a"), _spec("b")], 15)
    _load(states, "a", 0.0)
    held = states.ask("a", 5.0)
    waits = states.ask("b", 5.0)
    assert states.next(5.0) is None and states.models["a"].state is State.READY
    states.leave(held, 5.5)
    # its caller may ask again at once: for a quarter of a swap of half a second
    assert states.next(5.5) is None
    wake_at = states.wake_at(5.5)
    assert wake_at == pytest.approx(5.5 + 0.25 * states.loads.predict("b", 10))
    action = states.next(wake_at)
    assert isinstance(action, Unload) and action.reason == "room"
    states.unloaded(action.model, action.reason)
    action = states.next(5.6)
    assert isinstance(action, Load)
    states.loaded_as(action.model, action.model.account, 0.4, 6.0)
    assert waits.is_granted and states.evictions["room"] == 1


def test_callers_of_one_step_who_ask_again_are_served_before_a_swap() -> None:
    states = ModelStates([_spec("a"), _spec("b")], 15)
    _load(states, "a", 0.0)
    _load(states, "b", 100.0)
    _load(states, "a", 200.0)
    now, waits = 300.0, states.ask("b", 300.0)
    closes = now + 5.0 * max(0.5, states.swaps.known("b") or 0.0)
    while now < closes:
        # both end at once, and come back after 10 ms
        held = [states.ask("a", now) for _ in range(2)]
        now += 0.3
        for ticket in held:
            states.leave(ticket, now)
        if now < closes:
            assert states.next(now) is None and not waits.is_granted
            assert states.models["a"].state is State.READY
        now += 0.01
    # past the time that it has at most, it goes at once
    assert isinstance(states.next(now), Unload)


def test_a_busy_model_stops_its_intake_in_time_and_those_behind_come_next() -> None:
    states = ModelStates([_spec("a"), _spec("b")], 15)
    _load(states, "a", 0.0, 0.4)
    held = states.ask("a", 5.0)
    waits = states.ask("b", 5.0)
    states.next(5.0)
    wake = states.wake_at(5.0)
    assert wake is not None
    # five swaps: a is served meanwhile
    swap = states.loads.predict("b", 10)
    assert wake == pytest.approx(5.0 + 5 * swap)
    assert states.ask("a", wake - 0.1).is_granted
    assert states.next(wake) is None
    behind = states.ask("a", wake)
    assert states.models["a"].state is State.DRAINING and not behind.is_granted
    states.leave(held, wake + 1)
    states.leave(next(iter(states.models["a"].leases)), wake + 1)
    action = states.next(wake + 1)
    assert isinstance(action, Unload) and action.model.name == "a"
    states.unloaded(action.model, "room")
    action = states.next(wake + 1)
    assert isinstance(action, Load) and action.model.name == "b"
    states.loaded_as(action.model, action.model.account, 0.4, wake + 2)
    assert waits.is_granted and not behind.is_granted


def test_models_are_counted_in_bytes_and_a_large_one_waits_for_as_many_as_it_needs() -> None:
    specs = [_spec(name, 4, keep_alive=math.inf) for name in "abc"] + [_spec("large", 10)]
    states = ModelStates(specs, 13)
    for now, name in enumerate("abc"):
        _load(states, name, 100.0 * now)
    held = states.ask("c", 300.0)
    waits = states.ask("large", 301.0)
    # without c, which is in use, there would be too little
    assert states.next(301.0) is None
    assert [each.state for each in states.models.values()] == [State.READY] * 3 + [State.KNOWN]
    states.leave(held, 302.0)
    gone, now = [], 303.0
    while isinstance(action := states.next(now), Unload):
        gone.append(action.model.name)
        states.unloaded(action.model, action.reason)
        states.check_integrity()
    assert len(gone) == 3
    assert isinstance(action, Load)
    assert states.loaded_as(action.model, action.model.account, 0.5, now)
    assert _is_granted(waits)


def test_two_that_wait_behind_a_busy_one_both_come_up() -> None:
    """B and C behind A, whose callers never stop; room for one."""
    states = ModelStates([_spec(name) for name in "abc"], 15)
    _load(states, "a", 0.0)
    now, waits = 100.0, {name: states.ask(name, 100.0) for name in "bc"}
    callers = [states.ask("a", now) for _ in range(3)]
    came: dict[str, float] = {}
    for _ in range(2000):
        now += 0.05
        # callers of a ask again as soon as they are answered
        for index, ticket in enumerate(callers):
            if ticket.is_granted:
                states.leave(ticket, now)
                callers[index] = states.ask("a", now)
        for name, ticket in waits.items():
            if name not in came and ticket.is_granted:
                came[name] = now
                states.leave(ticket, now)
        action = states.next(now)
        if isinstance(action, Load):
            states.loaded_as(action.model, action.model.account, 0.5, now)
        elif action is not None:
            states.unloaded(action.model, action.reason)
    assert set(came) == {"b", "c"}
    assert max(came.values()) - 100.0 < 20.0
    # and a goes on
    assert states.models["a"].state is State.READY


def test_a_model_takes_requests_again_once_none_waits_for_its_room() -> None:
    states = ModelStates([_spec("a"), _spec("b")], 15, switch_wait=0.0)
    _load(states, "a", 0.0)
    held, waits = states.ask("a", 5.0), states.ask("b", 5.0)
    states.next(5.0)
    behind = states.ask("a", 5.0)
    assert not _is_granted(behind)
    states.leave(waits, 6.0)
    assert _is_granted(behind) and held.is_granted
    states.check_integrity()


def test_keep_alive_is_the_requests_then_the_models_then_the_servers() -> None:
    states = ModelStates([_spec("a", keep_alive=30.0), _spec("b")], 100, keep_alive=7.0)
    assert states.kept(states.models["a"]) == 30.0
    assert states.kept(states.models["b"]) == 7.0
    _load(states, "a", 0.0)
    assert states.wake_at(0.0) == 30.0
    ticket = states.ask("a", 1.0)
    states.leave(ticket, 2.0, keep_alive=0.0)
    action = states.next(2.0)
    assert isinstance(action, Unload) and action.reason == "keep_alive"


def test_models_that_all_fit_stay_and_others_go_after_five_minutes() -> None:
    assert ModelStates([_spec("a"), _spec("b")], 20).kept(_model("a")) == math.inf
    states = ModelStates([_spec("a"), _spec("b")], 19)
    assert states.kept(states.models["a"]) == 300.0
    assert ModelStates([_spec("a"), _spec("b")], 20, max_models=1).kept(_model("a")) == 300.0


def _model(name: str) -> Model:
    return ModelStates([_spec(name)], 100).models[name]


def test_a_model_that_never_fits_is_refused_with_both_numbers() -> None:
    mib = 2**20
    states = ModelStates([_spec("a", 5 * mib, pinned=True), _spec("b", 8 * mib)], 10 * mib)
    action = states.next(0.0)
    assert isinstance(action, Load), "a pinned one is loaded at start"
    states.loaded_as(action.model, action.model.account, 1.0, 1.0)
    with pytest.raises(ModelRoomError, match="takes 8 MiB, and there are 5 MiB"):
        states.ask("b", 2.0)
    states.pin("a", pinned=False)
    assert not states.ask("b", 2.0).is_granted


def test_a_load_that_takes_more_than_was_booked_is_undone() -> None:
    states = ModelStates([_spec("a")], 10)
    ticket = states.ask("a", 0.0)
    action = states.next(0.0)
    assert isinstance(action, Load)
    assert not states.loaded_as(action.model, Account(weights=12), 0.5, 1.0)
    assert isinstance(ticket.error, ModelRoomError) and states.ledger.free == 10
    states.check_integrity()


def test_a_load_that_ends_its_engine_twice_rests_and_is_tried_later() -> None:
    states = ModelStates([_spec("a")], 10)
    ticket = states.ask("a", 0.0)
    for _ in range(2):
        assert ticket.error is None
        action = states.next(0.0)
        assert isinstance(action, Load)
        states.failed(action.model, "it was killed", 0.0, crashed=True)
    assert isinstance(ticket.error, ModelFailedError) and "it was killed" in str(ticket.error)
    with pytest.raises(ModelFailedError) as refused:
        states.ask("a", 20.0)
    assert refused.value.retry_after == pytest.approx(40.0)
    assert not states.ask("a", 61.0).is_granted
    assert isinstance(states.next(61.0), Load)


def test_a_broken_file_stops_nothing_and_says_why() -> None:
    states = ModelStates([_spec("a", broken="it is truncated"), _spec("b")], 100)
    with pytest.raises(ModelFailedError, match="it is truncated"):
        states.ask("a", 0.0)
    _load(states, "b", 0.0)
    # a caller may have it tried again
    states.load("a")
    assert isinstance(states.next(1.0), Load)


def test_an_unknown_name_names_those_that_are_served() -> None:
    states = ModelStates([_spec("a", aliases=("x",)), _spec("b")], 100)
    assert states.find("x").name == "a"
    with pytest.raises(UnknownModelError, match="served are a, b"):
        states.ask("c", 0.0)


def test_asked_unload_waits_for_leases() -> None:
    states = ModelStates([_spec("a")], 100)
    _load(states, "a", 0.0)
    held = states.ask("a", 1.0)
    states.unload("a")
    assert states.next(1.0) is None
    later = states.ask("a", 1.0)
    assert not later.is_granted
    states.leave(held, 2.0)
    assert states.next(2.0) == Unload(states.models["a"], "asked")
    states.unloaded(states.models["a"], "asked")
    assert isinstance(states.next(2.0), Load), "a request waits for it"


def test_load_takes_an_unload_back_and_loads_none_that_is_there() -> None:
    states = ModelStates([_spec("a", keep_alive=5.0)], 100)
    _load(states, "a", 0.0)
    held = states.ask("a", 1.0)
    states.unload("a")
    states.load("a")
    assert states.ask("a", 1.0).is_granted
    states.leave(held, 1.0)
    for ticket in tuple(states.models["a"].leases):
        states.leave(ticket, 2.0)
    assert states.next(2.0) is None
    assert states.next(7.0) == Unload(states.models["a"], "keep_alive")
    states.unloaded(states.models["a"], "keep_alive")
    assert states.next(7.0) is None, "none wants it"


def test_unload_of_a_model_that_is_not_there_does_not_end_its_next_load() -> None:
    states = ModelStates([_spec("a")], 100)
    states.unload("a")
    _load(states, "a", 0.0)
    assert states.next(1.0) is None
    # a load that was asked for and has not begun is not
    states = ModelStates([_spec("a")], 100)
    states.load("a")
    states.unload("a")
    assert states.next(0.0) is None


def test_who_waits_for_a_model_without_a_place_is_refused() -> None:
    states = ModelStates([_spec("a", pinned=True), _spec("b")], 100, max_models=1)
    _load(states, "a", 0.0)
    with pytest.raises(ModelRoomError, match="at most 1 are in memory at once, and 1 are pinned"):
        states.ask("b", 1.0)
    states = ModelStates([_spec("a"), _spec("b")], 15, switch_wait=0.0)
    _load(states, "a", 0.0)
    held, waits = states.ask("a", 5.0), states.ask("b", 5.0)
    states.next(5.0)
    behind = states.ask("a", 5.0)
    states.pin("a", pinned=True)
    assert _is_granted(behind), "a pinned model makes no way"
    assert states.next(6.0) is None
    assert isinstance(waits.error, ModelRoomError) and held.is_granted
    states.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_events_never_unload_a_leased_model(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(5, 60) for _ in range(7)]
    specs = [
        _spec(
            f"m{i}",
            size,
            pinned=i == 6 and seed % 2 == 0,
            keep_alive=draw.choice([None, 0.0, 3.0]),
            broken="bad" if i == 5 else "",
        )
        for i, size in enumerate(sizes)
    ]
    states = ModelStates(specs, 100, max_models=draw.choice([None, 2, 3]), switch_wait=20.0)
    now = 0.0
    granted: list[Ticket] = []
    waiting: list[Ticket] = []
    action: Load | Unload | None = None
    num_granted = 0
    for _ in range(25_000):
        now += draw.expovariate(4.0)
        what = draw.random()
        if what < 0.3:
            with contextlib.suppress(ModelFailedError, ModelRoomError):
                waiting.append(states.ask(f"m{draw.randrange(7)}", now))
        elif what < 0.55 and granted:
            ticket = granted.pop(draw.randrange(len(granted)))
            states.leave(ticket, now, draw.choice([None, None, 0.0, 50.0]))
        elif what < 0.6 and waiting:
            states.leave(waiting.pop(draw.randrange(len(waiting))), now)
        elif what < 0.62:
            states.unload(f"m{draw.randrange(7)}")
        elif what < 0.63:
            with contextlib.suppress(ModelRoomError):
                states.load(f"m{draw.randrange(7)}")
        elif what < 0.632:
            states.pin(f"m{draw.randrange(7)}", pinned=draw.random() < 0.3)
        elif what < 0.64:
            resident = [m for m in states.models.values() if m.is_resident]
            busy = action is not None and action.model
            if resident and (victim := draw.choice(resident)) is not busy:
                states.failed(victim, "its engine ended", now, crashed=True)
                granted = [ticket for ticket in granted if ticket.model is not victim]
        elif action is None:
            action = states.next(now)
            if isinstance(action, Unload):
                assert not action.model.leases, "a leased model goes"
        elif isinstance(action, Unload):
            states.unloaded(action.model, action.reason)
            action = None
        elif draw.random() < 0.8:
            taken = max(1, action.model.spec.account.total + draw.randrange(-3, 6))
            fits = states.loaded_as(action.model, Account(weights=taken), 0.5, now)
            assert fits or not action.model.is_resident
            action = None
        else:
            states.failed(action.model, "no", now, crashed=draw.random() < 0.7)
            action = None
        num_granted += sum(t.is_granted for t in waiting)
        granted += [ticket for ticket in waiting if ticket.is_granted]
        waiting = [t for t in waiting if not t.is_granted and t.error is None]
        states.check_integrity()
        assert sum(len(m.leases) for m in states.models.values()) == len(granted)
    assert num_granted > 1000
    # all end: once no lease is left, everything that waits is served or refused
    for ticket in granted:
        states.leave(ticket, now)
    for _ in range(200):
        now = max(now + 0.1, states.wake_at(now) or 0.0)
        action = action or states.next(now)
        if isinstance(action, Load):
            states.loaded_as(action.model, action.model.spec.account, 0.1, now)
        elif action is not None:
            states.unloaded(action.model, action.reason)
        action = None
        for ticket in waiting:
            if ticket.is_granted:
                states.leave(ticket, now)
        waiting = [t for t in waiting if not t.is_granted and t.error is None]
    assert not waiting


def test_no_more_wait_for_a_model_than_its_queue_takes() -> None:
    states = ModelStates([_spec("a", max_waiting=2)], 100)
    first, second = states.ask("a", 0.0), states.ask("a", 0.0)
    with pytest.raises(QueueFullError, match="2 requests wait for the model a") as full:
        states.ask("a", 0.0)
    assert full.value.reason == "queue-full" and full.value.retry_after >= 1.0
    states.leave(first, 0.0)
    third = states.ask("a", 0.1)
    action = states.next(0.2)
    assert isinstance(action, Load)
    states.loaded_as(action.model, action.model.account, 0.5, 1.0)
    # in memory its engine's own queue counts
    assert all(_is_granted(each) for each in (second, third, states.ask("a", 1.0)))


def test_others_go_on_next_to_a_load_that_is_set_aside() -> None:
    states = ModelStates([_spec("a", 10), _spec("b", 10), _spec("c", 10)], 25)
    slow, other = states.ask("a", 0.0), states.ask("b", 0.1)
    first = states.next(0.2)
    assert isinstance(first, Load) and first.model.name == "a"
    assert states.next(0.3) is None, "one at a time"
    states.set_aside(first.model)
    second = states.next(9.0)
    assert isinstance(second, Load) and second.model.name == "b"
    assert states.loaded_as(second.model, second.model.account, 0.5, 9.5) and other.is_granted
    states.check_integrity()
    # its bytes stay booked: no third fits
    states.leave(other, 10.0)
    waits = states.ask("c", 20.0)
    action = states.next(20.0)
    assert isinstance(action, Unload) and action.model.name == "b"
    # what is under way is not ended by another's end
    assert states.loaded_as(first.model, first.model.account, 20.0, 20.5) and slow.is_granted
    assert states.next(20.6) is None
    states.unloaded(action.model, action.reason)
    assert isinstance(states.next(21.0), Load) and not waits.is_granted
    states.check_integrity()


def test_a_model_in_use_serves_five_whole_swaps_as_they_were_measured() -> None:
    states = ModelStates([_spec("a"), _spec("b")], 15)
    _load(states, "a", 0.0)
    now = 100.0
    for name, other in (("b", "a"), ("a", "b")) * 3:
        held, waits = states.ask(other, now), states.ask(name, now)
        swap = max(0.5, states.swaps.known(name) or 0.0)
        closes = max(now, states.models[other].loaded_at) + 5.0 * swap
        assert states.next(closes - 0.01) is None and states.models[other].state is State.READY
        closes += 0.001
        assert states.next(closes) is None and states.models[other].state is State.DRAINING
        # the requests under way take a second, the unload 0.2 and the load 0.5
        states.leave(held, closes + 1.0)
        gone = states.next(closes + 1.0)
        assert isinstance(gone, Unload)
        states.unloaded(gone.model, gone.reason)
        come = states.next(closes + 1.2)
        assert isinstance(come, Load)
        states.loaded_as(come.model, come.model.account, 0.5, closes + 1.7)
        states.leave(waits, closes + 1.7)
        now = closes + 2.0
    for name in "ab":
        assert states.swaps.known(name) == pytest.approx(1.7)
    # a caller who is told when to come back is told all of it
    assert states.wait_for("b") == pytest.approx(1.7)
