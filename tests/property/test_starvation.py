"""Every request ends while others keep coming, not only once nothing more comes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.policies import POLICIES
from paceline.core.slo import Slo
from tests.core.machine import Machine
from tests.driving import make_request


@pytest.mark.parametrize("examples", [2, pytest.param(16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_request_ends_while_others_keep_coming(policy: str, examples: int) -> None:
    """A regular tenant asks again and again beside tenants that ask once, at about capacity. Twenty
    wait from the start. None may take more than a time in which all that can have come before it is
    done several times over."""

    @settings(max_examples=examples, deadline=None)
    @given(seed=st.integers(0, 10**6), load=st.sampled_from([0.9, 1.0, 1.1]))
    def ends(seed: int, load: float) -> None:
        _ask_again(policy, seed, load)

    ends()


def _ask_again(policy: str, seed: int, load: float) -> None:
    rng = random.Random(seed)
    machine = Machine(
        policy=policy,
        max_num_seqs=2,
        priority_ageing_s=1.0,
        coalesce_window_s=0.1,
        queue_timeout_s=20.0,
    )
    machine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
    came: dict[str, float] = {}

    def arrive(tenant: str) -> str:
        name = f"r{len(came)}"
        came[name] = machine.now
        slo = rng.choice((Slo(), Slo(), Slo(ttft=3.0)))
        size, priority = rng.randint(30, 90), rng.randrange(2)
        machine.add(
            make_request(
                name, size, 2, arrival=machine.now, tenant=tenant, slo=slo, priority=priority
            )
        )
        return name

    for number in range(20):
        arrive(f"early{number}")
    regular = arrive("regular")
    following = 0.0
    while machine.now < 50.0:
        while following <= machine.now:
            arrive(f"once{len(came)}")
            # one of sixty tokens takes 72 ms alone
            following += rng.expovariate(load / 0.072)
        if regular in machine.finished:
            regular = arrive("regular")
        machine.step()
    dropped = {expired.request_id for expired in machine.expired}
    left = {
        name: machine.now - since
        for name, since in came.items()
        if name not in machine.finished and name not in dropped
    }
    assert max(left.values(), default=0.0) < 30.0, f"{left} have not ended"
