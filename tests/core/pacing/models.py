"""Step-time models whose times are known, and running requests, for the tests of pacing."""

from __future__ import annotations

from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from tests.driving import ask, make_request


def seconds(shape: StepShape) -> float:
    """10 ms a step and 0.1 ms a prompt token."""
    return 0.010 + 1e-4 * shape.wide_tokens


def trained() -> StepTimeModel:
    model = StepTimeModel()
    for index in range(200):
        shape = StepShape().plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        model.observe(shape, seconds(shape))
    return model


def running(tpot: float | None, first_token: float = 0.0, num_output: int = 1) -> Request:
    request = make_request("r", 10, 500, slo=Slo(tpot=tpot))
    request.status = RequestStatus.RUNNING
    for _ in range(num_output):
        request.output_token_ids.append(1)
        request.num_tokens += 1
    request.num_computed_tokens = request.num_tokens - 1
    request.first_token_time = first_token
    return request


def batch(request: Request) -> Request:
    return ask(request, slo=Slo(best_effort=True))


def row_seconds(shape: StepShape) -> float:
    """10 ms a step, 0.1 ms a prompt token and 2 ms a row."""
    return seconds(shape) + 2e-3 * shape.narrow_rows


def trained_on_rows(model: StepTimeModel | None = None) -> StepTimeModel:
    model = model or StepTimeModel()
    for index in range(400):
        shape = StepShape(32 * (index % 5), 0.0, 1 + index % 9, 100)
        model.observe(shape, row_seconds(shape))
    return model
