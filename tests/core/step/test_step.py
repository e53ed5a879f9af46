"""A step being built: what a row does to the step and to its request."""

from __future__ import annotations

from paceline.core.predict.step_time import StepShape
from tests.core.parts import parts, step_of
from tests.driving import make_request


def test_a_chunk_is_wide_and_the_one_that_catches_up_samples() -> None:
    request = make_request("a", 10)
    step = step_of(parts())
    step.add(request, 6, (3, 4))
    assert step.rows == [("a", 0, 6, (3, 4), False)]
    assert (request.num_computed_tokens, request.num_pending_tokens) == (6, 0)
    step = step_of(parts())
    step.add(request, 4, ())
    assert step.rows == [("a", 6, 4, (), True)] and step.requests == [request]
    assert (request.num_computed_tokens, request.num_pending_tokens) == (10, 1)
    assert request.history.num_chunks == 2
    # its tokens look back at 6, 7, 8 and 9 others, about
    assert step.shape == StepShape(4, 4 * (6 + 2.0), 0, 0)
    assert step.budget == 60


def test_a_row_of_one_token_is_narrow_and_no_chunk() -> None:
    request = make_request("a", 10)
    request.num_computed_tokens = 9
    step = step_of(parts())
    step.add(request, 1, ())
    assert step.shape == StepShape(0, 0.0, 1, 9) and request.history.num_chunks == 0
    # the next one is planned by position: its token is not known yet
    step = step_of(parts())
    step.add(request, 1, ())
    assert step.rows == [("a", 10, 1, (), True)] and request.num_pending_tokens == 2


def test_plain_rows_are_counted_as_if_they_had_been_added() -> None:
    added, counted = step_of(parts()), step_of(parts())
    for computed in (9, 5):
        request = make_request("a", computed + 1)
        request.num_computed_tokens = computed
        added.add(request, 1, ())
    counted.count_plain(2, 14)
    assert counted.shape == added.shape
    assert counted.budget == added.budget == 62
