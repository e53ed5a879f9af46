"""What ended is forgotten: no plan depends on it, and no memory is kept for it.

An engine may be idle for an hour between two requests. What a step saw of deadlines, memory and the
queue belongs to that step, and a request that has ended belongs to its caller.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from types import FunctionType, ModuleType
from typing import Any

import pytest

from paceline.core.policies import POLICIES
from paceline.core.request import Request
from tests.core.machine import Machine
from tests.driving import make_request
from tests.replay import observe
from tests.replay.observe import Core
from tests.replay.scenarios import play_rig


def reachable_requests(root: object) -> Counter[str]:
    """How many requests ``root`` leads to, by every way to them: types, and attributes if these
    hold what follows."""
    found: Counter[str] = Counter()
    came_from: dict[int, object] = {id(root): None}
    left = deque([root])
    # an id is that of one object alone while the object is alive
    kept: list[object] = [root]
    while left:
        holder = left.popleft()
        for held in _referents(holder):
            if isinstance(held, Request):
                found[_way(holder, held, came_from)] += 1
            elif id(held) not in came_from:
                came_from[id(held)] = holder
                kept.append(held)
                left.append(held)
    return found


def _way(holder: object, held: object, came_from: dict[int, object]) -> str:
    way = [type(held).__name__]
    while holder is not None:
        way.append(type(holder).__name__ + _attribute(holder, held))
        holder, held = came_from[id(holder)], holder
    return " > ".join(reversed(way))


def _referents(each: object) -> list[Any]:
    if isinstance(each, (type, ModuleType)):
        return []
    if isinstance(each, FunctionType):
        # not the module that it is written in
        return [*(each.__closure__ or ()), *(each.__defaults__ or ())]
    return gc.get_referents(each)


def _attribute(holder: object, held: object) -> str:
    names = [*getattr(holder, "__dict__", ())]
    for kind in type(holder).__mro__:
        names += getattr(kind, "__slots__", ())
    return next((f".{name}" for name in names if getattr(holder, name, None) is held), "")


def idle_after_pressing() -> Machine:
    """A machine whose requests all ended while deadlines pressed, an hour ago."""
    machine = Machine()
    for number in range(12):
        machine.add(machine.batch(f"batch{number}", 400, 3.0))
    for number in range(40):
        machine.add(make_request(f"user{number}", 200, 20, arrival=machine.now))
        machine.step()
        if observe.pressing(machine.scheduler):
            break
    else:
        raise RuntimeError("deadlines never pressed: the test's load has to be larger")
    machine.abort(*[f"batch{number}" for number in range(12)])
    machine.abort(*[f"user{number}" for number in range(40)])
    while machine._flying:
        machine.settle()
    if machine.scheduler.has_unfinished:
        raise RuntimeError("requests were left")
    machine.now += 3600.0
    return machine


def test_deadlines_of_requests_that_ended_do_not_press() -> None:
    machine = idle_after_pressing()
    machine.add(make_request("later", 50, 4, arrival=machine.now))
    pressed = []
    while machine.scheduler.has_unfinished:
        machine.plan()
        pressed.append(observe.pressing(machine.scheduler))
        machine.settle()
    assert not any(pressed), f"plans made with deadlines that press: {pressed}"


def test_requests_that_ended_while_deadlines_pressed_are_let_go() -> None:
    left = reachable_requests(idle_after_pressing().scheduler)
    assert not left, f"requests that ended, and the ways to them: {dict(left)}"


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 10), marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_requests_that_ended_are_let_go(policy: str, seeds: range) -> None:
    """Whatever happened to them."""
    left: Counter[str] = Counter()
    for seed in seeds:
        rig = play_rig(Core(), policy, seed)
        if not rig.scheduler.has_unfinished:
            left += reachable_requests(rig.scheduler)
    assert not left, f"requests that ended, and the ways to them: {dict(left)}"


def test_a_request_that_waits_is_found() -> None:
    machine = Machine()
    machine.add(make_request("waits", 50, 4))
    ways = reachable_requests(machine.scheduler)
    assert ways and all(way.startswith("Scheduler") for way in ways)
