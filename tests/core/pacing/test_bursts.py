"""What a burst says of the requests to come: at most its number a second, however short it was."""

from __future__ import annotations

import pytest

from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import make_request

BACKGROUND = Slo(slo_class="batch", best_effort=True)


def idle_machine(idle: float) -> Machine:
    """Four places, and so many seconds since the one request that came before."""
    machine = Machine(max_num_seqs=4)
    machine.add(make_request("earlier", 50, 2))
    machine.until_done()
    machine.now += idle
    return machine


@pytest.mark.parametrize("idle", [0.0, 3600.0])
@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_burst_is_told_as_its_number_a_second(gap: float, idle: float) -> None:
    """20 of one moment would be 20,000 a second, and the wait
    half a day."""
    machine = idle_machine(idle)
    for number in range(20):
        machine.add(make_request(f"c{number}", 50, 20, arrival=machine.now))
        machine.now += gap
    request = make_request("batch", 50, 20, arrival=machine.now, slo=BACKGROUND)
    machine.add(request)
    assert request.history.predicted_ttft is not None
    assert 0.1 < request.history.predicted_ttft < 70.0


@pytest.mark.parametrize("idle", [1.0, 3600.0])
def test_a_flood_is_told_as_one_though_no_request_came_for_long_before(idle: float) -> None:
    """Ten a second, more than the places serve: a batch request has its share of them."""
    machine = idle_machine(idle)
    started, number = machine.now, 0
    batch = None
    while batch is None or batch.first_token_time is None:
        while started + 0.1 * number <= machine.now:
            at = started + 0.1 * number
            machine.add(make_request(f"c{number}", 50, 20, arrival=at))
            number += 1
        if batch is None and machine.now >= started + 5.0:
            batch = make_request("batch", 50, 20, arrival=machine.now, slo=BACKGROUND)
            machine.add(batch)
        machine.step()
    came = batch.first_token_time - batch.asked.arrival_time
    assert came < 5.0
    assert batch.history.predicted_ttft == pytest.approx(came, abs=3.0)
