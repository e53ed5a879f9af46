"""Steps whose results are not in: when they end, and what they teach."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.core.outputs import DRAFT_MODEL, Draft, SchedulerOutput, StepResult
from paceline.core.predict.step_time import (
    NO_ADAPTERS,
    AdapterWork,
    StepShape,
    StepTimeModel,
)
from paceline.core.step.in_flight import StepsInFlight
from paceline.speculation.draft_tokens import NGRAM, UNMADE
from tests.driving import make_request

SHAPE = StepShape(8, 32.0, 2, 10)


def trained() -> StepTimeModel:
    """Every step takes 10 ms and 1 ms a token of prompt."""
    model = StepTimeModel()
    for index in range(200):
        shape = StepShape(8 * (index % 5), 0.0, index % 4, 0)
        model.observe(shape, 0.01 + 0.001 * shape.wide_tokens)
    assert model.ready
    return model


def plan(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, (), (), (), (), num_tokens=0)


def test_steps_run_one_after_another() -> None:
    steps = StepsInFlight(StepTimeModel(), 0.0)
    assert steps.starts(3.0) == 3.0
    steps.push(1, [], SHAPE, 3.0, 0.5, None)
    assert steps.starts(3.1) == 3.5
    steps.push(2, [], SHAPE, 3.5, 0.25, None)
    assert steps.starts(3.1) == 3.75
    # the first took longer: the second has just begun
    steps.pop(plan(1), StepResult(1, ()), 3.9)
    assert steps.starts(3.9) == pytest.approx(4.15)
    steps.pop(plan(2), StepResult(2, ()), 4.0)
    assert steps.starts(9.0) == 9.0, "nothing runs, whatever was predicted"


def test_results_come_in_the_order_of_plans() -> None:
    steps = StepsInFlight(StepTimeModel(), 0.0)
    steps.push(1, [], SHAPE, 0.0, 0.5, None)
    with pytest.raises(AssertionError, match="plan order"):
        steps.pop(plan(2), StepResult(2, ()), 1.0)


def test_whose_rows_they_were_comes_back_with_the_result() -> None:
    steps = StepsInFlight(StepTimeModel(), 0.0)
    one, two = make_request("one", 4), make_request("two", 4)
    steps.push(1, [one, two], SHAPE, 0.0, 0.5, None)
    steps.push(2, [one], SHAPE, 0.5, 0.5, None)
    assert (steps.num_rows(one), steps.num_rows(two)) == (2, 1)
    assert steps.pop(plan(1), StepResult(1, ()), 1.0) == [one, two]
    assert (steps.num_rows(one), steps.num_rows(two)) == (1, 0)
    assert (steps.num_prefill_tokens, steps.num_decode_tokens) == (8, 2)


def test_the_next_step_is_planned_shortly_before_this_one_ends_once_that_is_known() -> None:
    untrained = StepsInFlight(StepTimeModel(), 0.1)
    untrained.push(1, [], SHAPE, 0.0, 1.0, None)
    assert untrained.plan_at == -math.inf
    for lead in (0.1, 0.3):
        steps = StepsInFlight(trained(), lead)
        assert steps.plan_at == -math.inf, "nothing runs"
        steps.push(1, [], SHAPE, 0.0, 1.0, None)
        assert steps.plan_at == pytest.approx(1.0 - lead, abs=0.05)


def test_what_a_step_took_is_learned_and_compared_with_what_was_predicted() -> None:
    fresh, known = StepTimeModel(), trained()
    for model, compared in ((fresh, False), (known, True)):
        steps = StepsInFlight(model, 0.0)
        before = model.num_observations
        for step_id, elapsed in ((1, 0.02), (2, 0.0)):
            steps.push(step_id, [], SHAPE, 0.0, 0.5, None)
            steps.pop(plan(step_id), StepResult(step_id, (), elapsed=elapsed), 1.0)
        assert model.num_observations == before + 1, "a step without a time teaches nothing"
        assert steps.actual_seconds == (0.02 if compared else 0.0)
        assert steps.predicted_seconds == pytest.approx(0.018 if compared else 0.0, rel=0.1)


def test_a_step_teaches_what_ran_of_it() -> None:
    shapes = []

    class Told(StepTimeModel):
        def observe(
            self, shape: StepShape, seconds: float, adapters: AdapterWork = NO_ADAPTERS
        ) -> float:
            shapes.append(shape)
            return super().observe(shape, seconds, adapters)

    steps = StepsInFlight(Told(), 0.0)
    steps.push(1, [], StepShape(0, 0.0, 2 + 4 + 2, 10), 0.0, 0.5, None)
    drafts = (Draft(0, (UNMADE,) * 4, DRAFT_MODEL), Draft(1, (7, 8), NGRAM))
    result = StepResult(1, (), made=((0, (5,)),), elapsed=0.1)
    steps.pop(replace(plan(1), drafts=drafts), result, 1.0)
    # of four drafts the draft model made one
    assert shapes == [StepShape(0, 0.0, 2 + 1 + 2, 10)]
    assert steps.num_decode_tokens == 5


def test_making_drafts_is_part_of_a_step() -> None:
    steps = StepsInFlight(trained(), 0.0)
    steps.push(1, [], SHAPE, 0.0, 0.5, None, 0.2)
    steps.pop(plan(1), StepResult(1, (), elapsed=0.02, drafting=0.3), 1.0)
    assert steps.actual_seconds == pytest.approx(0.32)
    assert steps.predicted_seconds == pytest.approx(0.018 + 0.2, rel=0.05)


def test_the_share_of_ordinary_requests_fades() -> None:
    steps = StepsInFlight(StepTimeModel(), 0.0)
    steps.push(1, [], SHAPE, 0.0, 1.0, None)
    assert steps.ordinary_share == pytest.approx(0.1)
    steps.push(2, [], SHAPE, 10.0, 1.0, 0.0)
    assert steps.ordinary_share == pytest.approx(0.1 / math.e)
    steps.note_ordinary(10.0, 0.5)
    assert steps.ordinary_share == pytest.approx(0.1 / math.e + 0.05)
    # a step that was planned earlier than the last does not make the past larger
    steps.note_ordinary(5.0, 0.0)
    assert steps.ordinary_share == pytest.approx(0.1 / math.e + 0.05)
