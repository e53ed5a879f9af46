"""Processors that other engines use too: what a scheduler that is told of them does otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.core.pacing.budget import StepBudget, TpotGuard
from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape
from paceline.core.slo import Slo
from tests.core.pacing.test_first_token import predicted, state_with
from tests.driving import Driver, make_request


def trained(**config: Any) -> Driver:
    """A driver whose steps take 10 ms, 0.1 ms for each prompt token, and 1 ms for each row."""
    driver = Driver(**config)
    for index in range(200):
        shape = StepShape()
        for _ in range(1 + index % 8):
            shape = shape.plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        seconds = 0.010 + 1e-4 * shape.wide_tokens + 1e-3 * shape.narrow_rows
        driver.scheduler.step_time.observe(shape, seconds)
    return driver


def test_the_first_token_waits_for_others_in_each_step() -> None:
    state = state_with()
    alone = predicted(state)
    state.chunk.away_s = 0.03
    assert predicted(state) == pytest.approx(alone + 0.03, abs=0.002)
    # a queue of prompts ahead waits for them once in each of its steps
    queue = state_with(100, 100, 100)
    before = predicted(queue)
    queue.chunk.away_s = 0.03
    assert predicted(queue) > before + 2 * 0.03


def test_the_guard_of_the_pace_counts_others() -> None:
    scheduler = trained().scheduler
    running = [make_request("r", 10, 50, slo=Slo(tpot=0.05))]
    view, newcomer = RunningView.of(running), make_request("n", 10, 50)
    assert TpotGuard(view, scheduler.step_time).allows(newcomer)
    assert TpotGuard(view, scheduler.step_time, 0.03).allows(newcomer)
    # 0.9 of 50 ms are 45: two rows take 12, and 33.5 of others are too much
    assert not TpotGuard(view, scheduler.step_time, 0.0335).allows(newcomer)
    # the row alone would miss its target as well, so that it keeps none out any more
    assert TpotGuard(view, scheduler.step_time, 0.036).allows(newcomer)


def test_seconds_of_prompts_count_others() -> None:
    state = trained().scheduler.state
    budget = StepBudget(state.step_time, state.chunk, state.work, state.config)
    view = RunningView.of([])
    alone = budget.seconds_per_token(view)
    state.chunk.away_s = 0.1
    assert budget.seconds_per_token(view) > alone


def test_chunks_shrink_while_others_need_their_pace_and_grow_again() -> None:
    driver = trained(max_num_batched_tokens=4096, max_model_len=16384, num_blocks=4000)
    driver.add(make_request("long", 14000, 4))
    sizes = []
    for longest in (math.inf, 0.03, 0.0, math.inf):
        driver.scheduler.share(0.0, longest)
        sizes.append(driver.scheduler.schedule(driver.now).num_tokens)
    wide, small, least, again = sizes
    # 30 ms are 10 ms and 200 tokens
    assert 128 <= small <= 224 < wide
    assert least <= driver.scheduler.state.chunk.floor + 1
    assert again == wide
