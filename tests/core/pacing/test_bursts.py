"""What a burst says of those to come: little, where nobody came before it."""

from __future__ import annotations

import pytest

from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import make_request

BACKGROUND = Slo(slo_class="batch", best_effort=True)


def forecast_behind_a_burst(machine: Machine, gap: float) -> tuple[float, float]:
    """Of a request of a batch behind 20 chats: predicted TTFT, and seconds to its end."""
    for number in range(20):
        machine.add(make_request(f"c{number}", 50, 20, arrival=machine.now))
        machine.now += gap
    request = make_request("batch", 50, 20, arrival=machine.now, slo=BACKGROUND)
    machine.add(request)
    predicted = request.history.predicted_ttft
    assert predicted is not None
    return predicted, machine.until_done()["batch"] - request.asked.arrival_time


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_burst_after_a_silence_tells_of_no_flood(gap: float) -> None:
    machine = Machine(max_num_seqs=4)
    machine.add(make_request("earlier", 50, 2))
    machine.until_done()
    machine.now = 3600.0
    predicted, took = forecast_behind_a_burst(machine, gap)
    assert 0.1 < predicted < took < 5.0


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_the_first_requests_of_all_tell_of_at_most_a_minute_of_them(gap: float) -> None:
    """A rate is told from a second at least, and lasts until the request has aged."""
    predicted, _ = forecast_behind_a_burst(Machine(max_num_seqs=4), gap)
    assert predicted < 60.0
