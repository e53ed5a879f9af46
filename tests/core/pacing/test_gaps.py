"""Streams beside long prompts: no caller sees its tokens stop."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.outputs import StepResult
from paceline.core.predict.step_time import StepShape
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo
from tests.driving import Driver, make_request


def longest_gap(slo: Slo, per_token: float, *, cold: bool, **config: Any) -> float:
    """Seconds between two tokens of eight streams at most, beside prompts of 2,000 tokens.

    Args:
        per_token: seconds that a prompt token takes.
        cold: the first prompt comes right after start.
    """
    driver = Driver(
        num_blocks=16_000,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        enable_prefix_caching=False,
        **config,
    )
    scheduler: Scheduler = driver.scheduler

    def seconds(shape: StepShape) -> float:
        rows = 0.001 * shape.narrow_rows
        return 0.01 + per_token * shape.wide_tokens + rows + 1e-7 * shape.wide_keys

    arrivals = [make_request(f"s{i}", 30, 400, arrival=0.0, slo=slo) for i in range(8)]
    if not cold:
        sizes = [64 * (1 + i % 9) for i in range(20)]
        arrivals += [make_request(f"w{i}", n, 4, arrival=0.1) for i, n in enumerate(sizes)]
    arrivals += [make_request(f"p{i}", 2000, 2, arrival=0.5 + 0.5 * i) for i in range(3)]
    now, gap = 0.0, 0.0
    last: dict[str, float] = {}
    while arrivals or scheduler.has_unfinished:
        while arrivals and arrivals[0].asked.arrival_time <= now:
            scheduler.add_request(arrivals.pop(0))
        plan = scheduler.schedule(now)
        took = seconds(StepShape.of(plan.rows)) if plan.rows else 0.01
        now += took
        if not plan.rows:
            continue
        tokens = tuple((7,) if row.samples else () for row in plan.rows)
        for update in scheduler.update(plan, StepResult(plan.step_id, tokens, elapsed=took), now):
            name = update.request_id
            if update.new_token_ids and name.startswith("s"):
                gap = max(gap, now - last.get(name, now))
                last[name] = now
    return gap


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("per_token", [6e-4, 2e-3])
@pytest.mark.parametrize("policy", ["deadline", "fair"])
@pytest.mark.parametrize("slo", [Slo(tpot=0.06), NO_SLO], ids=["paced", "without-targets"])
def test_a_long_prompt_stops_no_stream(slo: Slo, policy: str, per_token: float, cold: bool) -> None:
    bound = {"policy": policy, "max_token_gap_s": 0.25}
    assert longest_gap(slo, per_token, cold=cold, **bound) <= 0.3
    # nothing but the bound does that
    free = longest_gap(slo, per_token, cold=cold, policy=policy, max_token_gap_s=None)
    assert free > 0.35


@pytest.mark.parametrize("policy", ["deadline", "fcfs", "fair"])
def test_a_target_for_the_gap_holds_whatever_the_policy(policy: str) -> None:
    slo = Slo(itl=0.1)
    assert longest_gap(slo, 6e-4, cold=False, policy=policy, max_token_gap_s=None) <= 0.12


def test_other_policies_have_no_bound_of_their_own() -> None:
    free = longest_gap(NO_SLO, 6e-4, cold=True, policy="fcfs", max_token_gap_s=0.25)
    assert free > 0.4


def test_a_gap_counts_as_missed() -> None:
    slo = Slo(itl=0.1, tpot=1.0)
    assert slo.has_targets
    assert slo.violations(0.0, 1.0, 2.0, 11, longest_gap=0.2) == ("itl",)
    assert slo.violations(0.0, 1.0, 2.0, 11, longest_gap=0.1) == ()
