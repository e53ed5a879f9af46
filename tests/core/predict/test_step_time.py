"""The step-time model finds known coefficients, follows drift, and never predicts less for more."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.outputs import ScheduledRow
from paceline.core.predict.step_time import (
    NO_ADAPTERS,
    AdapterWork,
    StepShape,
    StepTimeModel,
)


def true_seconds(shape: StepShape, slow: float = 1.0) -> float:
    return slow * (
        0.004
        + 5e-5 * shape.wide_tokens
        + 2e-8 * shape.wide_keys
        + 2e-4 * shape.narrow_rows
        + 3e-8 * shape.narrow_keys
        + 0.001 * (shape.wide_tokens > 0)
    )


def random_shape(rng: random.Random) -> StepShape:
    shape = StepShape()
    for _ in range(rng.randint(1, 64)):
        shape = shape.plus(rng.randint(1, 2000), 1)
    for _ in range(rng.choice((0, 0, 1, 2))):
        shape = shape.plus(rng.randint(0, 500), rng.randint(2, 512))
    return shape


def relative_errors(model: StepTimeModel, rng: random.Random, slow: float = 1.0) -> list[float]:
    shapes = [random_shape(rng) for _ in range(200)]
    return [abs(model.predict(s) / true_seconds(s, slow) - 1.0) for s in shapes]


def test_it_learns_a_machine_from_noisy_steps() -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    assert not model.ready
    for _ in range(600):
        shape = random_shape(rng)
        model.observe(shape, true_seconds(shape) * rng.uniform(0.9, 1.1))
    assert model.ready
    errors = relative_errors(model, rng)
    assert statistics.mean(errors) < 0.03
    assert max(errors) < 0.15
    assert 0.95 < model.quantile(0.5) < 1.05
    assert 1.05 < model.quantile(0.95) < 1.2


def test_it_follows_a_machine_that_slows_down() -> None:
    rng = random.Random(4)
    model = StepTimeModel(forgetting=0.98)
    for slow in (1.0, 2.5):
        for _ in range(600):
            shape = random_shape(rng)
            model.observe(shape, true_seconds(shape, slow))
        assert statistics.mean(relative_errors(model, rng, slow)) < 0.05


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 300), st.floats(1e-4, 1.0, allow_nan=False)),
        max_size=60,
    ),
    st.integers(0, 1000),
    st.integers(1, 500),
)
def test_more_work_never_predicts_less_time(
    steps: list[tuple[int, int, float]], start: int, num_tokens: int
) -> None:
    model = StepTimeModel()
    for before, tokens, seconds in steps:
        model.observe(StepShape().plus(before, tokens), seconds)
    base = StepShape().plus(10, 1)
    assert model.predict(base.plus(start, num_tokens)) >= model.predict(base)


def test_it_learns_what_adapters_cost() -> None:
    rng, model = random.Random(5), StepTimeModel()

    def extra(work: AdapterWork) -> float:
        return 5e-11 * work.num_bytes + 2e-11 * work.num_products

    for _ in range(400):
        work = NO_ADAPTERS
        if rng.random() < 0.7:
            work = AdapterWork(rng.randint(1, 64) * 10e6, rng.randint(1, 300) * 5e6)
        shape = random_shape(rng)
        model.observe(shape, true_seconds(shape) + extra(work), work)
    for work in (NO_ADAPTERS, AdapterWork(80e6, 40e6), AdapterWork(10e6, 1e9)):
        model.expect_adapters(work)
        shape = random_shape(rng)
        wanted = true_seconds(shape) + extra(work)
        assert abs(model.predict(shape) / wanted - 1) < 0.02
    # what was expected of one step does not stay for the next
    model.expect_adapters(NO_ADAPTERS)
    before = model.predict(shape)
    model.observe(shape, true_seconds(shape), AdapterWork(1e9, 1e9))
    assert abs(model.predict(shape) / before - 1) < 0.5


def test_shape_of_a_plan_is_the_sum_of_its_rows() -> None:
    rows = [ScheduledRow("a", 7, 1, (), True), ScheduledRow("b", 10, 20, (), False)]
    shape = StepShape().plus(7, 1).plus(10, 20)
    assert StepShape.of(rows) == shape == StepShape(20, 400.0, 1, 7)


def trained(rng: random.Random) -> StepTimeModel:
    """Steps of a machine that has served for long."""
    model = StepTimeModel()
    for _ in range(1000):
        shape = random_shape(rng)
        model.observe(shape, true_seconds(shape) * rng.uniform(0.95, 1.05))
    return model


# of a neighbour on one of two cores; of a laptop that is unplugged, and plugged in again
@pytest.mark.parametrize("slow", [3.0, 2.0, 1.4, 0.6])
def test_it_follows_a_clock_within_seconds(slow: float) -> None:
    """In virtual time, on a machine that decodes: three seconds after the change its steps are
    predicted as they are now, and prompts, of which none came since, not as they were."""
    rng = random.Random(7)
    model = trained(rng)
    decode, prompt = StepShape(0, 0.0, 16, 200 * 16), StepShape().plus(0, 300)
    now = 0.0
    while now < 3.0:
        shape = StepShape(0, 0.0, rng.randint(12, 20), rng.randint(2000, 4000))
        seconds = true_seconds(shape, slow) * rng.uniform(0.95, 1.05)
        model.observe(shape, seconds)
        now += seconds
    assert abs(model.predict(decode) / true_seconds(decode, slow) - 1.0) < 0.1
    # a quicker machine's are predicted too long until one is seen, which breaks no promise
    assert 0.8 < model.predict(prompt) / true_seconds(prompt, slow) < (1.1 if slow > 1.0 else 1.7)
    for _ in range(400):
        shape = random_shape(rng)
        model.observe(shape, true_seconds(shape, slow) * rng.uniform(0.95, 1.05))
    assert statistics.mean(relative_errors(model, rng, slow)) < 0.05


def test_what_the_new_fit_explains_is_no_change_of_the_machine() -> None:
    """Steps of many rows come for the first time shortly before a fit: until then they are far too
    long, and then the fit says more of the newest than what was lacking of late on average."""
    model = StepTimeModel()
    alone, many = StepShape(narrow_rows=1), StepShape(narrow_rows=40)
    for _ in range(117):
        model.observe(alone, 0.005)
    for _ in range(11):
        model.observe(many, 0.01475)
    assert model.num_observations % 32 == 0
    # the machine is what it was
    assert model._scale == 1.0
    for _ in range(64):
        model.observe(alone, 0.005)
        model.observe(many, 0.01475)
    assert model.predict(alone) == pytest.approx(0.005, rel=0.05)
    assert model.predict(many) == pytest.approx(0.01475, rel=0.05)


def test_steps_that_stop_now_and_then_are_predicted_on_average() -> None:
    """A thread that is off its processor for 15 ms in every 30: most steps of 5 ms notice nothing,
    and every fourth takes 20. A fit of relative errors follows the many."""
    rng = random.Random(8)
    model = trained(rng)
    shape = StepShape(0, 0.0, 4, 800)
    alone = true_seconds(shape)
    predicted = actual = 0.0
    for step in range(1000):
        seconds = alone * (4.0 if step % 4 == 0 else 1.0)
        told = model.observe(shape, seconds)
        if step >= 100:
            predicted, actual = predicted + told, actual + seconds
    assert abs(predicted / actual - 1.0) < 0.1


def test_a_single_stall_is_no_change_of_the_machine() -> None:
    model = trained(random.Random(9))
    shape = StepShape(0, 0.0, 8, 1600)
    before = model.predict(shape)
    model.observe(shape, 100 * true_seconds(shape))
    assert model.predict(shape) < 1.2 * before
    for _ in range(25):
        model.observe(shape, true_seconds(shape))
    assert abs(model.predict(shape) / before - 1.0) < 0.03
