"""Promises on a machine whose clock changes, in virtual time: a laptop that is unplugged."""

from __future__ import annotations

import pytest

from paceline.core.predict.step_time import StepShape
from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import make_request

PACE = 0.05


def slowed(slow: float, seconds: float) -> Machine:
    """Four streams decode; so many seconds ago every step began to take ``slow`` times as long."""
    machine = Machine(max_num_seqs=64)
    machine.add(*(make_request(f"stream{i}", 50, 4000) for i in range(4)))
    for _ in range(50):
        machine.step()
    usual = machine.takes
    machine.takes = machine.seconds = lambda shape: slow * usual(shape)
    changed = machine.now
    while machine.now < changed + seconds:
        machine.step()
    return machine


def paces(machine: Machine, count: int) -> list[float]:
    """Seconds a token of so many requests that come at once and ask for PACE."""
    requests = [
        make_request(f"paced{i}", 20, 60, arrival=machine.now, slo=Slo(tpot=PACE))
        for i in range(count)
    ]
    machine.add(*requests)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while len(last) < count:
        machine.step()
        for request in requests:
            name = request.request_id
            if request.num_output_tokens:
                first.setdefault(name, machine.now)
            if name in machine.finished:
                last.setdefault(name, machine.now)
    return [(last[name] - first[name]) / 59 for name in first]


@pytest.mark.parametrize("slow", [1.0, 2.0, 0.6])
def test_what_is_admitted_after_three_seconds_keeps_its_pace(slow: float) -> None:
    """Of forty, as many run as the slower machine serves in time: all 40 would take twice as long
    as they ask for, and the 18 that a model of the last 200 steps lets in, a third longer."""
    assert max(paces(slowed(slow, 3.0), 40)) < 1.01 * PACE


@pytest.mark.parametrize("slow", [2.0, 1.3, 0.6])
def test_steps_are_predicted_within_a_tenth_after_three_seconds(slow: float) -> None:
    machine = slowed(slow, 3.0)
    decode = StepShape.of(machine.plans[-1].rows)
    told = machine.scheduler.step_time.predict(decode)
    assert abs(told / machine.takes(decode) - 1.0) < 0.1
