"""What policy ``deadline`` assumes of requests that name no target."""

from __future__ import annotations

import pytest

from paceline.core.policies import POLICIES
from paceline.core.request import Request
from paceline.core.slo import NO_SLO, Slo
from tests.driving import Driver, make_request

DEFAULTS = {"default_ttft_s": 1.0, "default_tpot_s": 0.1}


def let_in(policy: str, slo: Slo, priority: int = 0) -> Request:
    driver = Driver(policy=policy, **DEFAULTS)
    driver.add(make_request("r", 4, 4, slo=slo, priority=priority))
    return driver.scheduler._requests["r"]


@pytest.mark.parametrize(
    ("slo", "priority", "ttft", "tpot", "late_after"),
    [
        (NO_SLO, 0, 1.0, 0.1, 1.0),
        (NO_SLO, 1, 2.0, 0.1, 2.0),
        (NO_SLO, -1, 0.5, 0.1, 1.0),
        (Slo(ttft=5.0), -2, 5.0, 0.1, 5.0),
        # the tighter target orders it, and is not held against it
        (Slo(ttft=0.4), 0, 0.4, 0.1, 1.0),
        # as late as without it, also where its priority doubles the default
        (Slo(ttft=0.4), 1, 0.4, 0.1, 2.0),
        (Slo(ttft=0.4), -1, 0.4, 0.1, 1.0),
        # to add one target takes no other away
        (Slo(tpot=0.03), 0, 1.0, 0.03, 1.0),
        (Slo(deadline=60.0), 0, 1.0, 0.1, 1.0),
    ],
)
def test_what_is_assumed(
    slo: Slo, priority: int, ttft: float, tpot: float, late_after: float
) -> None:
    request = let_in("deadline", slo, priority)
    assert (request.targets.ttft, request.targets.tpot) == (ttft, tpot)
    assert request.late_after == late_after
    assert request.targets.deadline == slo.deadline
    assert request.asked.slo is slo, "what was asked is what is counted"


def test_nothing_is_assumed_of_best_effort() -> None:
    slo = Slo(best_effort=True, deadline=9.0)
    assert let_in("deadline", slo).targets is slo


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"deadline"}))
def test_other_policies_assume_nothing(policy: str) -> None:
    assert let_in(policy, NO_SLO).targets is NO_SLO


def test_one_that_asks_for_nothing_is_begun_before_one_that_asks_for_little() -> None:
    driver = Driver(policy="deadline", max_num_seqs=1, **DEFAULTS)
    driver.add(make_request("running", 4, 3))
    driver.step()
    driver.add(make_request("little", 4, 3, slo=Slo(ttft=30.0)))
    driver.add(make_request("nothing", 4, 3))
    driver.run()
    admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
    assert admitted == ["running", "nothing", "little"]
