"""A refactoring of core must plan exactly as before.

Each case drives a scheduler through a fixed, seeded trace and hashes every plan. ``golden.json``
holds the hashes; a change that means to decide otherwise regenerates it and says why:

    python -m tests.replay.test_replay
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import QueueFullError
from paceline.core.predict.step_time import StepShape
from paceline.core.slo import NO_SLO, Slo
from tests.driving import Driver, ask, make_request

GOLDEN = Path(__file__).with_name("golden.json")

_SLOS = (NO_SLO, Slo(ttft=20.0, tpot=1.0), Slo(best_effort=True))


def _seconds(shape: StepShape) -> float:
    return 0.05 + 0.01 * shape.wide_tokens + 0.02 * shape.narrow_rows


# a driver's arguments and, where not the same for all, what requests are drawn from
CASES: dict[str, dict[str, Any]] = {
    "fcfs-roomy": {"num_blocks": 400},
    "fcfs-tight": {"num_blocks": 60, "watermark": 0.02},
    "fcfs-planned-ahead": {"num_blocks": 60, "depth": 2},
    "priority-tight": {"num_blocks": 60, "policy": "priority", "priority_ageing_s": 20.0},
    "everything-on": {
        "num_blocks": 60,
        "depth": 2,
        "policy": "deadline",
        "future_memory_check": True,
        "num_host_blocks": 40,
        "swap_block_seconds": 1e-4,
        "pressure_threshold": 0.88,
        "max_num_waiting": 300,
        "seconds": _seconds,
    },
    "swapping": {"num_blocks": 60, "num_host_blocks": 60, "preemption": "swap"},
    "no-prefix-caching": {"num_blocks": 60, "enable_prefix_caching": False},
    "sjf": {"num_blocks": 60, "policy": "sjf"},
    "boost": {"num_blocks": 60, "policy": "boost", "seconds": _seconds},
    "phase-aligned": {
        "num_blocks": 60,
        "policy": "phase-aligned",
        "coalesce_window_s": 3.0,
        "coalesce_size": 3,
    },
    "fair-tenants": {
        "num_blocks": 60,
        "depth": 2,
        "policy": "fair",
        "future_memory_check": True,
        "max_num_waiting": 40,
        "seconds": _seconds,
        "tenants": ("flood", "flood", "flood", "flood", "flood", "light", "other"),
        "slos": (NO_SLO, NO_SLO, NO_SLO, Slo(ttft=6.0, tpot=1.0)),
    },
    # all four bands, with deadlines that press and a share of the step
    "bands": {
        "num_blocks": 90,
        "policy": "deadline",
        "future_memory_check": True,
        "best_effort_delay_s": 20.0,
        "background_share": 0.5,
        "best_effort_step_s": 1.0,
        "seconds": _seconds,
        "slos": (
            NO_SLO,
            Slo(ttft=6.0, tpot=1.0),
            Slo(ttft=2.0),
            Slo(best_effort=True, deadline=60.0),
            Slo(best_effort=True, deadline=300.0),
            Slo(best_effort=True),
        ),
    },
}


def decision_log(case: dict[str, Any]) -> tuple[int, str]:
    """Steps, and a hash over every plan, of 150 requests in a bursty trace."""
    rng = random.Random(7)
    case = {"max_num_batched_tokens": 96, "max_num_seqs": 12} | case
    tenants = case.pop("tenants", None)
    slos = case.pop("slos", _SLOS if "seconds" in case else None)
    driver = Driver(**case)
    waiting = 150
    while waiting or driver.scheduler.has_unfinished:
        for _ in range(min(waiting, rng.choice((0, 0, 0, 0, 1, 6)))):
            name = f"r{waiting}"
            shared = list(range(24)) if rng.random() < 0.5 else []
            prompt = shared + [rng.randrange(997) for _ in range(rng.randint(1, 60))]
            parent = make_request(
                name, prompt, rng.randint(1, 40), arrival=driver.now, priority=rng.randrange(3)
            )
            if slos is not None:
                ask(parent, slo=rng.choice(slos))
            if tenants is not None:
                ask(parent, tenant=rng.choice(tenants))
            try:
                driver.add(parent)
            except QueueFullError:
                waiting -= 1
                continue
            if rng.random() < 0.1:
                driver.add(
                    make_request(f"{name}-fork", prompt, 9, arrival=driver.now, fork_of=name)
                )
            waiting -= 1
        driver.step()
        if rng.random() < 0.02:
            driver.abort(f"r{rng.randrange(1, 151)}")
    driver.run()
    log = hashlib.sha256()
    for plan in driver.plans:
        log.update(repr(plan).encode())
    return len(driver.plans), log.hexdigest()


@pytest.mark.parametrize("name", sorted(CASES))
def test_plans_are_those_recorded(name: str) -> None:
    steps, digest = decision_log(CASES[name])
    golden = json.loads(GOLDEN.read_text())[name]
    assert {"steps": steps, "sha256": digest} == golden, "plans changed: intended? then re-record"


def record() -> None:
    golden = {}
    for name, case in CASES.items():
        steps, digest = decision_log(case)
        golden[name] = {"steps": steps, "sha256": digest}
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    record()
