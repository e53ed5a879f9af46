"""Where a step's time is hidden is found, and not imagined where it is a sum of parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from paceline.core.predict.step_time import StepShape, StepTimeModel


def hidden(free: int) -> Callable[[StepShape], float]:
    """1 ms and the longer of reading the weights and the arithmetic of 30 us a token."""
    return lambda shape: (
        1e-3
        + 3e-5 * max(free, shape.wide_tokens + shape.narrow_rows)
        + 5e-8 * (shape.wide_keys / 100 + shape.narrow_keys)
    )


def added(shape: StepShape) -> float:
    """4 ms, 0.4 ms a token, 0.2 ms a row, and what the first wide row costs."""
    keys = 1e-7 * shape.wide_keys + 1e-6 * shape.narrow_keys
    wide = 4e-4 * shape.wide_tokens + 2e-3 * (shape.wide_tokens > 0)
    return 4e-3 + wide + 2e-4 * shape.narrow_rows + keys


def shape_of(rng: random.Random) -> StepShape:
    rows = rng.randint(1, 64)
    wide = rng.choice((0, rng.randint(2, 400), rng.randint(2, 2000)))
    return StepShape(wide, 200.0 * wide, rows, 300 * rows)


def feed(
    model: StepTimeModel,
    seconds: Callable[[StepShape], float],
    *,
    steps: int,
    noise: float,
    seed: int,
) -> list[int]:
    """What was believed after each step."""
    rng = random.Random(seed)
    found = []
    for _ in range(steps):
        shape = shape_of(rng)
        model.observe(shape, seconds(shape) * math.exp(rng.gauss(0.0, noise)))
        found.append(model.free_tokens)
    return found


@pytest.mark.parametrize("free", [100, 222, 500])
def test_it_finds_how_many_tokens_are_free(free: int) -> None:
    found = feed(StepTimeModel(), hidden(free), steps=300, noise=0.0, seed=1)
    assert found[60] == 0, "not before it looked"
    # sizes are a quarter of an octave apart
    assert all(free / 1.2 < size < free * 1.2 for size in found[100:])


@pytest.mark.parametrize("seed", range(4))
def test_noise_hides_it_for_a_while_only(seed: int) -> None:
    found = feed(StepTimeModel(), hidden(222), steps=600, noise=0.15, seed=seed)
    assert all(160 <= size <= 320 for size in found[300:])


@pytest.mark.parametrize("noise", [0.0, 0.15, 0.25])
def test_a_sum_of_parts_has_nothing_free_whatever_the_noise(noise: float) -> None:
    for seed in range(4):
        assert not any(feed(StepTimeModel(), added, steps=1500, noise=noise, seed=seed))


def test_tokens_that_cost_half_are_not_free() -> None:
    def bent(shape: StepShape) -> float:
        tokens = shape.wide_tokens + shape.narrow_rows
        return 4e-3 + 2e-4 * tokens + 2e-4 * max(0, tokens - 256)

    assert not any(feed(StepTimeModel(), bent, steps=600, noise=0.0, seed=1))


def test_it_forgets_what_is_no_longer_so() -> None:
    model = StepTimeModel()
    assert feed(model, hidden(222), steps=300, noise=0.05, seed=1)[-1] > 0
    assert feed(model, added, steps=1500, noise=0.05, seed=2)[-1] == 0
