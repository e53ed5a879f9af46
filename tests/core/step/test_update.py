"""Results: what tokens do to their requests, and what callers are told of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.outputs import (
    RequestUpdate,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from paceline.core.request import FinishReason, Forecast, ForecastKind, Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.step.update import Updates, update_of
from paceline.core.tier import Tier
from tests.core.parts import numbered, parts, run
from tests.driving import make_request


class Taking:
    """``Updates`` over requests of which all rows sample, or those that are named."""

    def __init__(self, state: SchedulerState, *requests: Request) -> None:
        self.state = state
        self.requests = requests
        run(state, *requests)
        for request in requests:
            request.first_scheduled_time = 0.75
        self.ended: list[tuple[str, FinishReason]] = []
        self.updates = Updates(state, self._finish)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        self.ended.append((request.request_id, reason))

    def take(
        self,
        *sampled: Sequence[int],
        samples: bool = True,
        errors: tuple[tuple[str, str], ...] = (),
        tell_all: bool = True,
        now: float = 1.0,
        **result: object,
    ) -> tuple[RequestUpdate, ...]:
        rows = tuple(
            ScheduledRow(request.request_id, 0, 1, (), samples) for request in self.requests
        )
        for request in self.requests:
            request.num_pending_tokens += samples
        plan = SchedulerOutput(1, rows, (), (), (), num_tokens=len(rows))
        tokens = tuple(map(tuple, sampled))
        return self.updates.apply_result(
            plan,
            list(self.requests),
            StepResult(1, tokens, errors=errors, **result),
            now,
            tell_all=tell_all,
        )


def test_a_token_is_appended_and_told() -> None:
    state = parts()
    taking = Taking(state, numbered("a", 0, 5), numbered("b", 1, 3))
    first = taking.take((7,), (8,), now=2.0)
    assert [(u.request_id, u.new_token_ids, u.finish_reason) for u in first] == [
        ("a", (7,), None),
        ("b", (8,), None),
    ]
    assert all(u.timeline is not None for u in first), "the first tells the story so far"
    a, b = taking.requests
    assert (a.output_token_ids, a.num_tokens, a.num_pending_tokens) == ([7], 6, 0)
    assert a.first_token_time == b.first_token_time == 2.0
    assert state.totals.num_prompt_tokens == 5 + 3
    second = taking.take((9,), (10,), now=3.0)
    assert [u.timeline for u in second] == [None, None], "nothing new to tell"
    assert a.output_token_ids == [7, 9] and a.first_token_time == 2.0
    assert state.totals.num_prompt_tokens == 8


def test_the_short_way_of_a_token_is_the_long_way() -> None:
    """A token goes the long way beside one that failed: its update and its request are the same."""
    told = []
    for errors in ((), (("other", "it broke"),)):
        state = parts()
        taking = Taking(state, numbered("a", 0, 5), numbered("other", 1, 3))
        taking.take((1,), (2,))
        logprobs = ((), None)
        update, *_ = taking.take((3,), (4,), errors=errors, logprobs=logprobs)
        a = taking.requests[0]
        told.append((update, a.output_token_ids, a.num_tokens, a.num_pending_tokens))
    assert told[0] == told[1]
    assert taking.ended == [("other", FinishReason.ERROR)]


def test_a_chunk_that_samples_nothing_says_nothing() -> None:
    taking = Taking(parts(), numbered("a", 0, 50))
    assert taking.take((), samples=False) == ()
    assert taking.requests[0].num_tokens == 50 and not taking.requests[0].timeline_sent


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, (5, 6, 7, 8), (5, 6, 7), FinishReason.LENGTH, None),
        ({"eos_token_ids": frozenset({6})}, (5, 6, 7), (5, 6), FinishReason.STOP, None),
        ({"stop_token_ids": frozenset({6})}, (5, 6, 7), (5, 6), FinishReason.STOP, 6),
        # the last that may come is a stop as well
        (
            {"max_tokens": 2, "stop_token_ids": frozenset({6})},
            (5, 6),
            (5, 6),
            FinishReason.STOP,
            6,
        ),
        (
            {"min_tokens": 3, "stop_token_ids": frozenset({6})},
            (6, 6, 6, 6),
            (6, 6, 6),
            FinishReason.STOP,
            6,
        ),
        ({}, (5, 6), (5, 6), None, None),
    ],
)
def test_of_several_tokens_those_up_to_the_end_count(
    sampling: dict[str, object],
    tokens: tuple[int, ...],
    kept: tuple[int, ...],
    reason: FinishReason | None,
    stop_reason: int | None,
) -> None:
    request = make_request("a", 4, **{"max_tokens": 8, **sampling})
    taking = Taking(parts(), request)
    logprobs = (tuple(TokenLogprobs(token, -1.0, 1, ()) for token in tokens),)
    (update,) = taking.take(tokens, logprobs=logprobs)
    assert update.new_token_ids == kept == tuple(request.output_token_ids)
    assert update.logprobs == logprobs[0][: len(kept)]
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)
    # its place in the list of running requests is given up once for all that end in a step
    assert taking.ended == ([] if reason is None else [("a", reason)])


def test_a_failure_is_told_with_its_message_and_without_its_token() -> None:
    taking = Taking(parts(), numbered("a", 0, 5), numbered("b", 1, 5))
    failed, other = taking.take((1,), (2,), errors=(("a", "out of luck"),))
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "out of luck")
    assert failed.new_token_ids == () and failed.timeline is not None
    assert not taking.requests[0].output_token_ids
    assert other.new_token_ids == (2,) and other.error is None


def test_a_result_for_a_request_that_has_ended_is_dropped() -> None:
    taking = Taking(parts(), numbered("a", 0, 5))
    taking.requests[0].status = RequestStatus.FINISHED
    assert taking.take((1,)) == ()
    assert taking.requests[0].num_pending_tokens == 0, "its step is over all the same"
    assert not taking.requests[0].output_token_ids


def test_a_simulator_is_told_of_ends_alone() -> None:
    taking = Taking(parts(), make_request("a", 4, 2), numbered("b", 1, 4))
    assert taking.take((1,), (1,), tell_all=False) == ()
    assert [u.request_id for u in taking.take((2,), (2,), tell_all=False)] == ["a"]
    assert taking.requests[1].output_token_ids == [1, 2]


@pytest.mark.parametrize("demoted", [False, True])
def test_first_tokens_are_kept_for_forecasts(demoted: bool) -> None:
    state = parts()
    request = numbered("a", 0, 5, arrival=0.5)
    forecast = Forecast(ForecastKind(Tier.ORDINARY, 0, False, False), 1.0, 1.0, 0.0, 0.0)
    request.history.forecast, request.history.demoted = forecast, demoted
    Taking(state, request).take((1,), now=2.0)
    assert state.last.first_tokens == [(forecast, 1.5, demoted)]


def test_a_policy_that_counts_is_given_every_token_once() -> None:
    state = parts(policy="fair")
    counted: list[list[str]] = []
    policy = state.policy
    policy.sampled = lambda requests: counted.append([request.request_id for request in requests])
    taking = Taking(state, numbered("a", 0, 5), make_request("b", 4, 3))
    taking.take((1,), (1, 2, 3, 4))
    taking.take((2,), ())
    assert counted == [["a", "b", "b", "b"], ["a"]], "what came behind the end is nobody's"


def test_an_update_by_itself_tells_the_story_at_the_end_or_where_it_is_not_told() -> None:
    request = numbered("a", 0, 5)
    assert update_of(request, (1,), None).timeline is not None
    request.timeline_sent = True
    assert update_of(request, (1,), None).timeline is None
    request.finish_reason = FinishReason.ABORT
    told = update_of(request, (), None, "gone")
    assert told.timeline is not None and told.error == "gone"
    assert told.first_scheduled_time == 0.0, "it never ran"


def test_an_id_that_ends_an_answer_is_no_stop_reason_though_it_is_asked_for() -> None:
    for token, reason in ((2, None), (3, 3)):
        request = make_request(
            "a", 4, eos_token_ids=frozenset({2}), stop_token_ids=frozenset({2, 3})
        )
        (update,) = Taking(parts(), request).take((token,))
        assert update.finish_reason is FinishReason.STOP and update.stop_reason == reason
