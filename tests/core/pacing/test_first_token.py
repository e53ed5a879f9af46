"""Forecasts of the first token: what they count, and that they correct themselves."""

from __future__ import annotations

from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.predict.step_time import StepShape
from paceline.core.step.state import SchedulerState
from tests.driving import Driver, make_request

NEWCOMER = make_request("new", 100)


def state_with(*waiting: int, places: int = 4) -> SchedulerState:
    """A step takes 100 tokens, two requests run and so many more could, and prompts of these sizes
    wait."""
    state = Driver(max_num_seqs=2 + places).scheduler.state
    for index in range(200):
        shape = StepShape().plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        state.step_time.observe(shape, 0.010 + 1e-4 * shape.wide_tokens)
    state.running.requests += [make_request(f"r{i}", 2, 50 * (i + 1)) for i in range(2)]
    for number, size in enumerate(waiting):
        state.waiting.push(make_request(f"w{number}", size))
    state.last.chunk_tokens = 100
    return state


def predicted(state: SchedulerState) -> float:
    seconds = FirstTokenForecast(state).predict(NEWCOMER)
    assert seconds is not None
    return seconds


def test_forecasts_count_tokens_ahead_and_ends_of_running_requests() -> None:
    # own prompt: one step of 10 ms + 100 tokens at 0.1 ms
    assert 0.018 < predicted(state_with()) < 0.022
    assert 0.11 < predicted(state_with(500)) < 0.13
    # no slot: the shorter of the two running requests ends after 50 steps of 10 ms
    assert 0.50 < predicted(state_with(places=0)) < 0.54
    assert 1.00 < predicted(state_with(1, places=0)) < 1.04


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    forecast = FirstTokenForecast(Driver().scheduler.state)
    assert forecast.note(NEWCOMER) is None
    assert NEWCOMER.history.predicted_ttft is None


def test_a_bias_corrects_itself() -> None:
    state = state_with()
    forecast, before = FirstTokenForecast(state), predicted(state)
    for _ in range(200):
        assert forecast.note(NEWCOMER) is not None and NEWCOMER.history.forecast is not None
        state.last.first_tokens.append((NEWCOMER.history.forecast, 2.0 * before))
    after = forecast.predict(NEWCOMER)
    assert after is not None and 1.9 * before < after < 2.1 * before
    assert not state.last.first_tokens


def test_what_is_learned_of_one_kind_says_nothing_of_another() -> None:
    """Later arrivals go before those of a low priority, and before nobody else."""
    state = state_with()
    forecast = FirstTokenForecast(state)
    high, low = make_request("high", 100, priority=0), make_request("low", 100, priority=1)
    before = forecast.predict(high)
    for _ in range(100):
        assert forecast.note(low) is not None and low.history.forecast is not None
        state.last.first_tokens.append((low.history.forecast, 30.0))
    after = forecast.predict(low)
    assert before is not None and after is not None
    assert forecast.predict(high) == before
    # no more than that at once
    assert 7.0 * before < after <= 8.0 * before
