"""Which of those that wait a forecast takes to be served before a newcomer."""

from __future__ import annotations

import pytest

from paceline.core.queues.fair_queue import FairQueue, TenantWeights
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import make_request


def test_those_with_an_earlier_key() -> None:
    queue = RequestQueue()
    for number in range(20):
        request = make_request(f"r{number}", 4)
        request.order = (float(number), number)
        queue.push(request)
    newcomer = make_request("new", 4)
    for key, ahead in ((-1.0, 0), (6.5, 7), (99.0, 20)):
        newcomer.order = (key, 0)
        assert queue.num_ahead(newcomer) == ahead


def test_a_long_queue_is_sampled() -> None:
    queue = RequestQueue()
    for number in range(5000):
        request = make_request(f"r{number}", 4)
        request.order = (float(number * 7919 % 5000), number)
        queue.push(request)
    newcomer = make_request("new", 4)
    newcomer.order = (1250.0, 0)
    assert queue.num_ahead(newcomer) == pytest.approx(1250, abs=300)


def test_tenants_take_turns() -> None:
    queue = FairQueue(0.0, TenantWeights({}))
    for number in range(12):
        queue.push(make_request(f"r{number}", 4, tenant="many" if number < 10 else "few"))
    assert queue.num_ahead(make_request("a", 4, tenant="new")) == 2
    assert queue.num_ahead(make_request("b", 4, tenant="few")) == 2 + 3
    assert queue.num_ahead(make_request("c", 4, tenant="many")) == 10 + 2


def test_tenants_take_as_many_turns_as_they_weigh() -> None:
    weights = TenantWeights({"many": 3.0})
    queue = FairQueue(0.0, weights)
    for number in range(12):
        queue.push(make_request(f"r{number}", 4, tenant="many" if number < 10 else "few"))
    assert queue.num_ahead(make_request("a", 4, tenant="new")) == 3 + 1
    assert queue.num_ahead(make_request("b", 4, tenant="few")) == 2 + 9
    # 11 turns of three times the weight
    assert queue.num_ahead(make_request("c", 4, tenant="many")) == 10 + 2
    assert queue.num_ahead(make_request("d", 4, tenant="new")) == 3 + 1


@pytest.mark.parametrize("policy", ["deadline", "priority"])
def test_an_urgent_request_is_not_told_to_wait_for_those_behind_it(policy: str) -> None:
    machine = Machine(policy=policy, max_num_seqs=2)
    machine.add(*(make_request(f"r{i}", 400, 40, priority=5) for i in range(12)))
    for _ in range(6):
        machine.step()
    urgent = make_request("urgent", 40, 4, arrival=machine.now, slo=Slo(ttft=1.0), priority=0)
    patient = make_request("patient", 40, 4, arrival=machine.now, priority=9)
    machine.add(urgent, patient)
    assert urgent.history.predicted_ttft is not None
    assert patient.history.predicted_ttft is not None
    assert urgent.history.predicted_ttft < 0.3 * patient.history.predicted_ttft
    while urgent.first_token_time is None:
        machine.step()
    took = machine.now - urgent.asked.arrival_time
    # by priority it displaces one that runs, which is better than was said
    assert took <= 1.2 * urgent.history.predicted_ttft
