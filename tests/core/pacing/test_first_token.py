"""Forecasts of the first token: what they count, and that they correct themselves."""

from __future__ import annotations

from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from tests.driving import make_request


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
