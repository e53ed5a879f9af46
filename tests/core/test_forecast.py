"""Future memory against brute force, and forecasts that correct themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.memory.outlook import FirstTokenForecast, MemoryOutlook, future_peak
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request
from tests.driving import make_request


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=12))
def test_future_peak_is_what_stepping_finds(sequences: list[tuple[int, int]]) -> None:
    peak = 0
    for step in range(51):
        alive = [(now, to_come) for now, to_come in sequences if to_come >= step]
        peak = max(peak, sum(now + step for now, _ in alive))
    assert future_peak(sequences) == peak


def outlook(running: list[Request], num_held_blocks: int) -> MemoryOutlook:
    work = WorkEstimator(StepTimeModel(), LengthHistory())
    return MemoryOutlook(
        running, work, num_blocks=40, num_held_blocks=num_held_blocks, block_size=4
    )


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_an_outlook_may_be_told_later_what_is_held(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], before: int, held: int
) -> None:
    requests = [make_request(f"r{i}", *sizes) for i, sizes in enumerate(running)]
    kept, fresh = outlook(requests, before), outlook(requests, held)
    kept.admits(make_request("first", *waiting[0]), 0)
    kept.hold(held)
    for index, sizes in enumerate(waiting):
        newcomer = make_request(f"w{index}", *sizes)
        admitted = fresh.admits(newcomer, 0)
        assert kept.admits(newcomer, 0) == admitted
        if admitted:
            fresh.add(newcomer, 0)
            kept.add(newcomer, 0)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=4),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=2, max_size=12
    ),
)
def test_whoever_is_asked_about_after_others_gets_the_same_answer(
    running: list[tuple[int, int]], waiting: list[tuple[int, int, bool]]
) -> None:
    requests = [make_request(f"r{i}", *sizes) for i, sizes in enumerate(running)]
    # nobody shares blocks
    held = 1000
    kept = outlook(requests, held)
    # of more than there is memory: what each holds has to be looked at
    kept.admits(make_request("large", 100, 100), 0)
    admitted: list[Request] = []
    for index, (*sizes, has_room) in enumerate(waiting):
        newcomer = make_request(f"w{index}", *sizes)
        fresh = outlook([*requests, *admitted], held)
        admits = fresh.admits(newcomer, 0)
        assert kept.admits(newcomer, 0) == admits
        if admits and has_room:
            kept.add(newcomer, 0)
            admitted.append(newcomer)


def trained() -> StepTimeModel:
    model = StepTimeModel()
    for index in range(200):
        shape = StepShape().plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        model.observe(shape, 0.010 + 1e-4 * shape.wide_tokens)
    return model


def forecast_of(forecast: FirstTokenForecast, **ahead: int) -> float:
    running = [make_request(f"r{i}", 4, 50 * (i + 1)) for i in range(2)]
    forecast.look(running, free_places=ahead.pop("free_places", 4), tokens_per_step=100)
    seconds = forecast.seconds(100, **({"tokens_ahead": 0, "requests_ahead": 0} | ahead))
    assert seconds is not None
    return seconds


def test_forecasts_count_tokens_ahead_and_ends_of_running_requests() -> None:
    model = trained()
    forecast = FirstTokenForecast(model, WorkEstimator(model, LengthHistory()))
    # own prompt: one step of 10 ms + 100 tokens at 0.1 ms
    assert 0.018 < forecast_of(forecast) < 0.022
    assert 0.11 < forecast_of(forecast, tokens_ahead=500) < 0.13
    # no slot: the shorter of the two running requests ends after 50 steps of 10 ms
    assert 0.50 < forecast_of(forecast, free_places=0) < 0.54
    assert 1.00 < forecast_of(forecast, free_places=0, requests_ahead=1) < 1.04


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    model = StepTimeModel()
    forecast = FirstTokenForecast(model, WorkEstimator(model, LengthHistory()))
    forecast.look([], free_places=4, tokens_per_step=100)
    assert forecast.seconds(100, tokens_ahead=0, requests_ahead=0) is None


def test_a_bias_corrects_itself() -> None:
    model = trained()
    forecast = FirstTokenForecast(model, WorkEstimator(model, LengthHistory()))
    before = forecast_of(forecast)
    for _ in range(200):
        forecast.learn(forecast_of(forecast) / forecast.bias, 2.0 * before)
    assert 1.9 * before < forecast_of(forecast) < 2.1 * before
