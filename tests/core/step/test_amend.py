"""Steps that ran otherwise than planned."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.request import Request, RequestStatus
from paceline.core.scheduler import Scheduler
from tests.driving import make_request


def scheduler_of(*requests: Request, **config: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512,
        "adaptive_token_budget": False, "preemption": "recompute",
    }  # fmt: skip
    # such a backend has block tables and a prefix cache of its own
    cache = CacheConfig(block_size=4, num_blocks=256, enable_prefix_caching=False)
    made = Scheduler(SchedulerConfig(**(defaults | config)), cache)
    for request in requests:
        made.add_request(request)
    return made


def finish(scheduler: Scheduler, plan: SchedulerOutput, now: float) -> None:
    """The step ran: each row that samples brings its position as the token."""
    tokens = tuple((row.start + row.num_tokens,) if row.samples else () for row in plan.rows)
    scheduler.update(plan, StepResult(plan.step_id, tokens, elapsed=0.01), now)
    scheduler.check_integrity()


def shares(plan: SchedulerOutput) -> dict[str, tuple[int, int, bool]]:
    return {row.request_id: (row.start, row.num_tokens, row.samples) for row in plan.rows}


def test_row_left_out_is_planned_again() -> None:
    scheduler = scheduler_of(make_request("a", 10), make_request("b", 20))
    plan = scheduler.schedule(0.0)
    plan = scheduler.amend(plan, {"b": range(0)}, (), 0.0)
    assert shares(plan) == {"a": (0, 10, True)} and plan.num_tokens == 10
    scheduler.check_integrity()
    # the next one is planned before the first has returned, as with asynchronous scheduling
    following = scheduler.schedule(0.01)
    assert shares(following) == {"a": (10, 1, True), "b": (0, 20, True)}
    finish(scheduler, plan, 0.02)
    finish(scheduler, following, 0.03)
    assert scheduler.step_time.num_observations == 1, "only the step that ran as planned teaches"


def test_shortened_and_moved_rows() -> None:
    scheduler = scheduler_of(make_request("a", 40), make_request("b", 12))
    plan = scheduler.schedule(0.0)
    assert shares(plan) == {"a": (0, 40, True), "b": (0, 12, True)}
    # "a" got a shorter chunk, and for "b" a prefix of 8 tokens was found
    plan = scheduler.amend(plan, {"a": range(16), "b": range(8, 12)}, (), 0.0)
    assert shares(plan) == {"a": (0, 16, False), "b": (8, 4, True)} and plan.num_tokens == 20
    finish(scheduler, plan, 0.01)
    assert shares(scheduler.schedule(0.02)) == {"a": (16, 24, True), "b": (12, 1, True)}


def test_step_of_which_nothing_ran() -> None:
    scheduler = scheduler_of(make_request("a", 10))
    plan = scheduler.amend(scheduler.schedule(0.0), {"a": range(0)}, (), 0.0)
    assert not plan.rows and not plan.num_tokens
    finish(scheduler, scheduler.schedule(0.01), 0.02)


def test_preempted_by_the_backend() -> None:
    scheduler = scheduler_of(make_request("a", 10), make_request("b", 10))
    finish(scheduler, scheduler.schedule(0.0), 0.01)
    flying = scheduler.schedule(0.01)
    plan = scheduler.amend(scheduler.schedule(0.02), {}, ("b",), 0.02)
    assert shares(plan) == {"a": (11, 1, True)}
    (b,) = (request for request in scheduler.requests if request.request_id == "b")
    assert b.status is RequestStatus.WAITING and not b.block_ids and b.num_preemptions == 1
    # it is ready again once the token that was on its way is known
    third = scheduler.schedule(0.03)
    assert "b" not in shares(third)
    for each in (flying, plan, third):
        finish(scheduler, each, 0.04)
    start, num_tokens, samples = shares(scheduler.schedule(0.05))["b"]
    assert start + num_tokens == 12 and samples


def test_only_the_newest_plan() -> None:
    scheduler = scheduler_of(make_request("a", 10))
    first = scheduler.schedule(0.0)
    scheduler.schedule(0.01)
    with pytest.raises(AssertionError, match="before the next one"):
        scheduler.amend(first, {"a": range(0)}, (), 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_tokens(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        make_request(f"r{i}", chance.randrange(1, 90), chance.randrange(1, 20)) for i in range(12)
    ]
    # demotion and pace are the same code for amended steps, so both are in it
    scheduler = scheduler_of(*requests, policy=chance.choice(["fcfs", "deadline"]))
    flying: list[SchedulerOutput] = []
    now = 0.0
    while scheduler.has_unfinished:
        now += 0.01
        plan = scheduler.schedule(now)
        done = {}
        for row in plan.rows:
            if chance.random() < 0.2:
                done[row.request_id] = range(
                    row.start, row.start + chance.randrange(row.num_tokens)
                )
        running = [r.request_id for r in scheduler.requests if r.status is RequestStatus.RUNNING]
        preempted = [each for each in running if chance.random() < 0.05]
        if done or preempted:
            done = {name: ran for name, ran in done.items() if name not in preempted}
            plan = scheduler.amend(plan, done, preempted, now) if plan.rows else plan
        scheduler.check_integrity()
        flying += [plan] if plan.rows else []
        if len(flying) == 2 or (not plan.rows and flying):
            finish(scheduler, flying.pop(0), now)
    for request in requests:
        first = request.num_prompt_tokens
        assert request.output_token_ids == list(
            range(first, first + request.asked.sampling.max_tokens)
        )
