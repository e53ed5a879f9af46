"""Length history: quantiles conditional on what was generated already."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.predict.output_length import LengthHistory, WorkEstimator, longer_than
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.request import Request
from paceline.core.slo import Slo
from tests.driving import make_request


def estimate(
    history: LengthHistory, label: str | int, num_output: int, max_tokens: int
) -> tuple[WorkEstimator, Request]:
    """What estimates by this history, and a request of this label with so many tokens so far."""
    request = make_request("r", 8, max_tokens)
    request.num_tokens += num_output
    request.label = label  # type: ignore[assignment]
    return WorkEstimator(StepTimeModel(), history), request


def predict(
    history: LengthHistory, label: str | int, num_output: int, max_tokens: int, q: float
) -> int:
    """Output tokens in the end, where nothing is known as many as there may be."""
    work, request = estimate(history, label, num_output, max_tokens)
    return work.output_tokens(request, q)


def expect(
    history: LengthHistory, label: str | int, num_output: int, max_tokens: int, q: float
) -> int:
    """The same, where nothing is known twice what there is."""
    work, request = estimate(history, label, num_output, max_tokens)
    return work.expected_tokens(request, q)


def test_nothing_known_predicts_the_most() -> None:
    assert predict(LengthHistory(), "a", 0, 77, 0.5) == 77


def test_quantiles_are_conditional_on_the_tokens_so_far() -> None:
    history = LengthHistory(min_samples=1)
    for value in range(1, 101):
        history.observe("a", value)
    assert predict(history, "a", 0, 1000, 0.5) == 51
    assert predict(history, "a", 50, 1000, 0.5) == 76
    assert predict(history, "a", 100, 1000, 0.5) == 1000, "longer than anything seen"
    assert predict(history, "a", 0, 20, 0.5) == 20


def test_labels_are_apart_and_small_ones_use_all() -> None:
    history = LengthHistory(min_samples=4)
    for _ in range(10):
        history.observe("short", 5)
        history.observe("long", 500)
    history.observe("rare", 7)
    assert predict(history, "short", 0, 1000, 0.9) == 5
    assert predict(history, "long", 0, 1000, 0.1) == 500
    assert predict(history, "rare", 0, 1000, 0.9) == 500


def test_the_window_forgets() -> None:
    history = LengthHistory(window=10, min_samples=1)
    for value in [900] * 10 + [3] * 10:
        history.observe("a", value)
    assert predict(history, "a", 0, 1000, 0.99) == 3


@given(
    st.lists(st.integers(1, 300), max_size=50),
    st.integers(0, 300),
    st.integers(1, 300),
    st.floats(0, 1),
)
def test_predictions_stay_between_now_and_the_limit(
    seen: list[int], num_output: int, more: int, q: float
) -> None:
    history = LengthHistory(window=20, min_samples=3)
    for value in seen:
        history.observe(value % 2, value)
    limit = num_output + more
    assert num_output < predict(history, 1, num_output, limit, q) <= limit


def test_what_nothing_is_known_of_is_expected_to_double() -> None:
    history = LengthHistory(min_samples=2)
    assert expect(history, "a", 0, 4000, 0.7) == 256
    assert expect(history, "a", 300, 4000, 0.7) == 600
    assert expect(history, "a", 0, 50, 0.7) == 50
    for length in (20, 30, 40):
        history.observe("a", length)
    assert expect(history, "a", 0, 4000, 0.7) == predict(history, "a", 0, 4000, 0.7) == 40
    assert expect(history, "a", 500, 4000, 0.7) == 1000, "longer than any"


def test_for_many_requests_the_history_is_asked_once_for_those_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)
    history = LengthHistory(min_samples=4)
    work = WorkEstimator(StepTimeModel(), history)
    requests = []
    for index in range(60):
        # the last of these classes is never seen to end
        slo = Slo(slo_class=rng.choice("abc"))
        request = make_request(f"r{index}", 8, rng.randint(33, 63), slo=slo)
        if index < 9:
            request.num_tokens += rng.randint(1, 30)
        if slo.slo_class != "c":
            history.observe(request.label, rng.randint(1, 50))
        requests.append(request)
    expected = []
    for request in requests:
        num_output, most = request.num_output_tokens, request.asked.sampling.max_tokens
        length = longer_than(num_output, history.known(request.label), 0.5)
        expected.append(1 if length is None else min(length, most) - num_output)
    known, asked = history.known, []
    monkeypatch.setattr(history, "known", lambda label: asked.append(label) or known(label))
    assert work.least_left(requests, 0.5) == expected
    assert len(set(expected)) > 5
    assert len(set(asked)) == 3
    assert len(asked) == len({(r.label, r.num_output_tokens) for r in requests}) < len(requests)
    unknown = WorkEstimator(StepTimeModel(), LengthHistory())
    assert unknown.least_left(requests, 0.5) == [1] * len(requests)
