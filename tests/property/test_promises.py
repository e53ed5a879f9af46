"""On a machine whose step times are known, so that all that predicts is at work: whatever comes in
whatever order, plans keep to their limits and everybody ends."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import Request
from paceline.core.slo import NO_SLO, Slo
from paceline.errors import QueueFullError
from tests.core.machine import Machine
from tests.driving import make_request

POLICIES = ("deadline", "fcfs", "fair", "phase-aligned", "priority", "static")
SLOS = (
    *(Slo(slo_class="batch", best_effort=True, deadline=due) for due in (3.0, 8.0, 20.0)),
    Slo(ttft=1.0, tpot=0.03),
    NO_SLO,
    Slo(slo_class="batch", best_effort=True),
)
STEPS = 90


def config_of(rng: random.Random) -> dict[str, Any]:
    return {
        "policy": rng.choice(POLICIES),
        "depth": rng.choice([1, 2]),
        "max_num_seqs": rng.choice([4, 12, 24]),
        "max_num_batched_tokens": rng.choice([24, 64, 640]),
        "num_blocks": rng.choice([60, 200, 2000]),
        "num_host_blocks": rng.choice([0, 50]),
        "swap_block_seconds": 1e-4,
        "enable_prefix_caching": rng.random() < 0.5,
        "adaptive_token_budget": rng.random() < 0.7,
        "best_effort_step_s": rng.choice([0.05, 0.4]),
        "future_memory_check": rng.random() < 0.5,
        "pressure_threshold": rng.choice([0.5, 0.88, 1.0]),
    }


@pytest.mark.parametrize("examples", [8, pytest.param(60, marks=pytest.mark.thorough)])
def test_plans_keep_to_their_limits_and_everybody_ends(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(st.integers(0, 2**32))(_play))()


def _play(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(**config_of(rng))
    requests: list[Request] = []
    aborted: set[str] = set()

    def add(name: str, length: tuple[int, int], slo: Slo, tenant: str, fork_of: str | None) -> None:
        request = make_request(
            name, *length, arrival=machine.now, slo=slo, tenant=tenant, fork_of=fork_of
        )
        machine.scheduler.lengths.observe(request.label, length[1])
        with suppress(QueueFullError):
            machine.add(request)
            requests.append(request)

    for number in range(STEPS):
        if rng.random() < 0.4 and len(requests) < 40:
            length = rng.choice([4, 20, 60, 150]), rng.choice([2, 20, 40])
            slo, tenant = rng.choice(SLOS), rng.choice("ab")
            add(f"r{number}", length, slo, tenant, None)
            if rng.random() < 0.2 and requests[-1].request_id == f"r{number}":
                add(f"f{number}", length, slo, tenant, f"r{number}")
        if rng.random() < 0.05 and requests:
            aborted.add(victim := rng.choice(requests).request_id)
            machine.abort(victim)
        # the driver asks every plan for its tokens and rows, and the scheduler for its integrity
        machine.step()
    machine.run()
    ended = set(machine.finished) | {expired.request_id for expired in machine.expired} | aborted
    assert ended >= {request.request_id for request in requests}
