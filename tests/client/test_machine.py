"""The state machine of a call, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client import (
    Event,
    FellBack,
    Finished,
    NoAnswerError,
    Policy,
    RefusedError,
    Restarted,
    Resumed,
    RetryBudget,
    Retrying,
    Started,
    StreamInterruptedError,
    Target,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from paceline.client.machine import Machine
from paceline.client.steps import (
    Broken,
    Close,
    Connected,
    Data,
    Head,
    Input,
    Open,
    Request,
    Start,
    Tick,
)
from tests.client.play import (
    SSE_HEADERS,
    WALL,
    Play,
    in_turn,
    refusing,
    streaming,
    unreachable,
)
from tests.client.scripted import FIRST_ID, TEXT, WORDS, chat_stream, sse

TWO = (Target("http://a", "m"), Target("http://b", "m"))
OTHERS = (Target("http://a", "m"), Target("http://b", "small"))


def whole(action: Open) -> Sequence[Input]:
    return streaming(chat_stream(action.body))


def without_trouble(events: list[Event]) -> list[Event]:
    return [e for e in events if not isinstance(e, Retrying | Resumed)]


UNCUT = Play(whole).events
LENGTH = len(chat_stream(Play(whole).opened[0].body))


def cut_at(*places: int) -> Play:
    """The n-th attempt ends after ``places[n]`` bytes."""
    left = list(places)

    def serve(action: Open) -> Sequence[Input]:
        data = chat_stream(action.body)
        return streaming(data[: left.pop(0)] if left else data)

    return Play(serve, attempts=9)


def test_an_answer() -> None:
    play = Play(whole)
    words = [TextDelta(word) for word in WORDS if word]
    usage = Usage(3, len(WORDS))
    assert play.events == [
        Started(0, "chatcmpl-1", "m"),
        *words,
        Finished("stop", usage, TEXT),
    ]
    (opened,) = play.opened
    assert opened.body == {
        "messages": [],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "seed": 7,
    }


def test_cut_at_every_byte() -> None:
    for place in range(LENGTH):
        play = cut_at(place)
        assert without_trouble(play.events) == UNCUT, place
        told = [e for e in play.events if isinstance(e, Resumed)]
        sent = [o.body.get("resume_output_ids", []) for o in play.opened]
        if told:
            assert sent == [[], [FIRST_ID + i for i in range(told[0].position)]]
        # every byte was the end of some attempt: where all tokens are there, it was enough
        assert len(play.opened) == 1 or isinstance(play.events[-1], Finished)


@given(st.lists(st.integers(0, LENGTH), max_size=4))
def test_cut_again_and_again(places: list[int]) -> None:
    assert without_trouble(cut_at(*places).events) == UNCUT


@given(st.integers(1, 40), st.sampled_from([b"\n", b"\r", b"\r\n"]))
def test_bytes_come_in_any_pieces(piece: int, line_end: bytes) -> None:
    def serve(action: Open) -> Sequence[Input]:
        return streaming(chat_stream(action.body).replace(b"\n", line_end), piece=piece)

    assert Play(serve).events == UNCUT


def cut_without_ids(action: Open) -> Sequence[Input]:
    data = chat_stream(action.body, ids=False)
    return streaming(data[: data.index(b" is ")])


def test_text_without_ids_is_not_gone_on_from() -> None:
    play = Play(cut_without_ids)
    assert isinstance(play.error, StreamInterruptedError)
    assert play.error.partial == "The sum" and len(play.opened) == 1


def test_a_restart_is_told() -> None:
    answers = iter((cut_without_ids, whole))
    play = Play(lambda action: next(answers)(action), restart_allowed=True)
    at = play.events.index(Restarted(0))
    assert "".join(e.text for e in play.events[:at] if isinstance(e, TextDelta)) == "The sum"
    assert play.events[at + 1 :] == UNCUT[1:]


@pytest.mark.parametrize("header", [False, True])
def test_a_server_that_begins_again_is_found_out(header: bool) -> None:
    """It sends ids as vLLM does, and passes over ``resume_output_ids``."""
    cut = 1

    def serve(action: Open) -> Sequence[Input]:
        nonlocal cut
        data = chat_stream(action.body, resumes=False)
        end, cut = (data.index(b" is "), 0) if cut else (len(data), 0)
        inputs = streaming(data[:end])
        if header and "resume_output_ids" in action.body:
            inputs[1] = Head(
                200, SSE_HEADERS | {"x-paceline-ignored-fields": "resume_output_ids"}, WALL
            )
        return inputs

    play = Play(serve)
    assert isinstance(play.error, StreamInterruptedError) and len(play.opened) == 2
    assert "".join(e.text for e in play.events if isinstance(e, TextDelta)) == "The sum"


def test_another_prompt_is_found_out() -> None:
    cut = [True]

    def serve(action: Open) -> Sequence[Input]:
        data = chat_stream(action.body)
        if cut.pop() if cut else False:
            return streaming(data[: data.index(b" is ")])
        return streaming(data.replace(b"[1, 2, 3]", b"[1, 2, 4]"))

    assert isinstance(Play(serve).error, StreamInterruptedError)


def test_a_stream_goes_on_at_another_target_of_the_same_model() -> None:
    def serve(action: Open) -> Sequence[Input]:
        data = chat_stream(action.body)
        return streaming(data if action.target else data[: data.index(b" is ")])

    play = Play(serve, targets=TWO)
    assert FellBack(1) in play.events and Resumed(1, 2) in play.events
    assert play.events[-1] == Finished("stop", Usage(3, len(WORDS)), TEXT, target=1)
    other = Play(serve, targets=OTHERS)
    # its ids would mean something else: the same target is asked, and breaks again
    assert {o.target for o in other.opened} == {0} and len(other.opened) == 3
    assert isinstance(other.error, StreamInterruptedError)
    again = Play(serve, targets=OTHERS, restart_allowed=True)
    assert Restarted(1) in again.events and "resume_output_ids" not in again.opened[1].body
    assert again.events[-1] == Finished("stop", Usage(3, len(WORDS)), TEXT, target=1)


def test_all_tokens_were_there() -> None:
    """A server that ends in a chunk of its own, cut before it."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [5, 6]}]}
    play = Play(in_turn(streaming(sse(chunk))), body={"messages": [], "max_tokens": 2})
    assert play.events[-1] == Finished("length", None, "ab")


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 507, 522, 529, 530, 599])
def test_statuses_that_are_retried(status: int) -> None:
    play = Play(lambda _: refusing(status))
    assert isinstance(play.error, NoAnswerError) and play.error.status == status
    # half of 0.5 s and half of 1 s
    assert [round(at - 1000, 6) for at in play.opened_at] == [0, 0.25, 0.75]
    assert play.events == [
        Retrying(2, f"status {status}", 0.25),
        Retrying(3, f"status {status}", 0.5),
    ]


@pytest.mark.parametrize("status", [400, 406, 413, 418, 422, 451, 494])
def test_statuses_that_are_not(status: int) -> None:
    play = Play(in_turn(refusing(status, b'{"error": {"message": "no"}}')), targets=TWO)
    assert isinstance(play.error, RefusedError)
    assert (play.error.status, play.error.message) == (status, "no")


@pytest.mark.parametrize("status", [301, 401, 402, 403, 404, 405, 410, 501])
def test_statuses_of_one_target(status: int) -> None:
    """Its key, or its models: another target is asked at once, and the same one never again."""
    no = refusing(status, b'{"error": {"message": "no"}}')
    alone = Play(in_turn(no))
    assert isinstance(alone.error, RefusedError) and len(alone.opened) == 1
    assert (alone.error.status, alone.error.message) == (status, "no")
    play = Play(lambda action: no if action.target == 0 else refusing(503), targets=TWO)
    assert [action.target for action in play.opened] == [0, 1, 1]
    assert isinstance(play.error, NoAnswerError) and play.error.status == 503
    both = Play(lambda _: no, targets=TWO, attempts=9)
    assert isinstance(both.error, RefusedError) and len(both.opened) == 2


@pytest.mark.parametrize(("code", "asked"), [(400, [0]), (402, [0, 1]), (429, [0, 1, 0])])
def test_an_event_that_reports_an_error_has_a_status(code: int, asked: list[int]) -> None:
    event = streaming(sse({"error": {"message": "no", "code": code}}))
    play = Play(lambda _: event, targets=TWO)
    assert [action.target for action in play.opened] == asked
    assert isinstance(play.error, NoAnswerError if code == 429 else RefusedError)


def test_the_server_has_the_last_word_on_retries() -> None:
    assert isinstance(Play(in_turn(refusing(503, x_should_retry="false"))).error, RefusedError)
    assert len(Play(lambda _: refusing(400, x_should_retry="true")).opened) == 3


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry_after": "7"}, 7),
        ({"retry_after_ms": "1500", "retry_after": "9"}, 1.5),
        ({"retry_after": "Tue, 24 Nov 2026 00:00:11 GMT"}, 11),
        # by the server's own clock, which is ten seconds ahead
        (
            {
                "retry_after": "Tue, 24 Nov 2026 00:00:21 GMT",
                "date": "Tue, 24 Nov 2026 00:00:10 GMT",
            },
            11,
        ),
        # in the past, and nonsense: the back-off holds
        ({"retry_after": "Tue, 24 Nov 2026 00:00:00 GMT"}, 0.25),
        ({"retry_after": "soon"}, 0.25),
        ({"retry_after": "nan"}, 0.25),
    ],
)
def test_retry_after(headers: dict[str, str], wait: float) -> None:
    answers = iter((refusing(429, **headers), None))
    play = Play(lambda action: next(answers) or whole(action))
    assert play.events[0] == Retrying(2, "status 429", pytest.approx(wait))  # type: ignore[arg-type]
    assert without_trouble(play.events) == UNCUT


def test_too_long_a_wait() -> None:
    # the second is longer than the call may take
    for seconds, policy in ((61, {}), (50, {"total_timeout": 40})):
        alone = Play(in_turn(refusing(429, retry_after=str(seconds))), **policy)
        assert isinstance(alone.error, NoAnswerError) and alone.error.retry_after == seconds
    answers = iter((refusing(429, retry_after="3600"), None))
    play = Play(lambda action: next(answers) or whole(action), targets=TWO)
    assert play.events[:2] == [Retrying(2, "status 429", 0.0), FellBack(1)]


def test_targets_take_turns_and_the_first_waits() -> None:
    play = Play(lambda _: unreachable(), targets=TWO)
    assert [(o.target, at - 1000) for o, at in zip(play.opened, play.opened_at, strict=True)] == [
        (0, 0),
        (1, 0),
        (0, 0.25),
    ]


def test_the_budget() -> None:
    budget = RetryBudget(ratio=0.1, minimum=2)
    assert len(Play(lambda _: unreachable(), budget=budget).opened) == 3
    play = Play(lambda _: unreachable(), budget=budget)
    # 0.2 of two calls and 0.25 seconds of waiting are not one
    assert len(play.opened) == 1 and "budget" in str(play.error)
    for _ in range(20):
        Play(whole, budget=budget)
    assert len(Play(lambda _: unreachable(), budget=budget).opened) == 3


def test_a_budget_comes_back_by_itself() -> None:
    budget = RetryBudget(ratio=0, minimum=1)
    assert budget.take(10.0) and not budget.take(10.5)
    assert budget.take(11.0) and not budget.take(11.0)
    # never more than the minimum
    assert budget.take(99.0) and not budget.take(99.0)


def test_a_budget_is_no_hoard() -> None:
    budget = RetryBudget(ratio=1, minimum=0)
    for _ in range(1000):
        budget.deposit()
    assert [budget.take(1.0) for _ in range(101)] == [True] * 100 + [False]


@pytest.mark.parametrize(
    ("inputs", "seconds", "words"),
    [
        ([], 5, "no connection in time"),
        ([Connected()], 20, "no first token"),
        ([Connected(), Head(200, SSE_HEADERS, WALL), Data(b": hm\n\n")], 20, "no first token"),
        ([Connected(), Head(503, {}, WALL)], 2, "status 503"),
    ],
)
def test_timeouts(inputs: list[Input], seconds: float, words: str) -> None:
    play = Play(lambda _: inputs, first_token_timeout=20, attempts=1)
    assert play.now == 1000 + seconds and words in str(play.error)


def test_waking_up_early_does_nothing() -> None:
    machine = Machine(
        Request("/completions", {}, 0),
        TWO,
        Policy(),
        RetryBudget(),
        lambda: 0.5,
        [set(), set()],
    )
    assert machine.handle(Start(), 0.0)
    assert machine.handle(Tick(), 4.9) == [] and machine.deadline == 5.0
    assert machine.handle(Tick(), 5.0)
    assert machine.cancel() == [Close()] and machine.over


def test_gaps_and_the_total() -> None:
    def stalls(action: Open) -> Sequence[Input]:
        data = chat_stream(action.body)
        return streaming(data[: data.index(b" is ")], closed=False)

    play = Play(stalls, gap_timeout=3, attempts=1)
    assert isinstance(play.error, StreamInterruptedError) and "no further token" in str(play.error)
    assert play.now == 1003
    late = Play(stalls, gap_timeout=300, total_timeout=40)
    assert late.now == 1040 and "too long" in str(late.error)
    # the reason is known: only counts are missing
    data = chat_stream({"stream_options": {}}).partition(b'"choices": []')[0]
    done = Play(in_turn(streaming(data, closed=False)), gap_timeout=3)
    assert done.now == 1003 and done.events[-1] == Finished("stop", None, TEXT)


@pytest.mark.parametrize(
    "data",
    [
        b"data: garbage\n\n",
        b"data: [1]\n\n",
        b"data: \xff\n\n",
        b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [5]}}]}\n\n',
        b'data: {"choices": [{"index": 1, "delta": {"content": "x"}}]}\n\n',
        b'data: {"choices": 5}\n\n',
        b"data: [DONE]\n\n",
        b"data: " + b"x" * 3000,
        b'data: {"error": {"message": "engine died", "code": 500}}\n\n',
        b'data: {"error": "engine died"}\n\n',
        b"",
    ],
)
def test_broken_answers_are_asked_for_again(data: bytes) -> None:
    answers = iter((streaming(data), None))
    play = Play(lambda action: next(answers) or whole(action), max_event_bytes=2000)
    assert without_trouble(play.events)[-len(UNCUT) + 1 :] == UNCUT[1:]
    assert len(play.opened) == 2


def test_an_error_event_that_would_come_again() -> None:
    data = sse({"error": {"message": "too long", "code": 400}})
    play = Play(in_turn(streaming(data)))
    assert isinstance(play.error, RefusedError) and play.error.message == "too long"


def test_an_answer_that_is_no_stream() -> None:
    play = Play(lambda _: [Connected(), Head(200, {"content-type": "text/html"}, WALL)])
    assert isinstance(play.error, NoAnswerError) and "no event stream" in str(play.error)


def test_fields_that_a_server_refuses_are_left_out() -> None:
    def strict(action: Open) -> Sequence[Input]:
        for name in ("return_token_ids", "stream_options"):
            if name in action.body:
                return refusing(422, f"extra inputs: {name}".encode())
        body: dict[str, Any] = {**action.body, "stream_options": {}}
        return streaming(chat_stream(body))

    left_out: list[set[str]] = [set()]
    play = Play(strict, attempts=1, left_out=left_out)
    # later calls do not ask for them
    assert left_out == [{"return_token_ids", "stream_options"}]
    assert without_trouble(play.events) == UNCUT
    assert play.opened[-1].body == {"messages": [], "model": "m", "stream": True, "seed": 7}


def test_another_target_is_sent_all_fields() -> None:
    first = (refusing(400, b"no return_token_ids"), refusing(503))
    answers = iter((*first, None))
    play = Play(lambda action: next(answers) or whole(action), targets=TWO)
    assert ["return_token_ids" in o.body for o in play.opened] == [True, False, True]


def test_a_refusal_is_not_read_for_ever() -> None:
    play = Play(lambda _: [Connected(), Head(400, {}, WALL), Data(b"x" * 70_000)])
    assert play.now == 1000 and isinstance(play.error, RefusedError)
    assert len(play.error.message) == 2000


def test_text_without_its_ids_is_not_gone_on_from() -> None:
    """As where a server's parser of tool calls swallows some."""
    parts = [
        {"index": 0, "delta": {"content": "ab"}, "token_ids": [5, 6]},
        {"index": 0, "delta": {"content": "c"}},
        {"index": 0, "delta": {"content": "d"}, "token_ids": [8]},
    ]
    play = Play(in_turn(streaming(sse(*({"choices": [part]} for part in parts)))))
    assert isinstance(play.error, StreamInterruptedError) and play.error.partial == "abcd"


def test_fields_come_back_where_they_were_not_to_blame() -> None:
    """A refusal that repeats the request names all its fields."""
    left_out: list[set[str]] = [set()]
    echo = b"bad messages in " + b" ".join(map(str.encode, chat_fields()))
    play = Play(lambda _: refusing(422, echo), left_out=left_out)
    assert isinstance(play.error, RefusedError) and len(play.opened) == 2
    assert left_out == [set()]


def chat_fields() -> list[str]:
    return list(Play(whole).opened[0].body)


NAMES = (
    *("choices", "delta", "content", "tool_calls", "function", "arguments", "index", "id", "name"),
    *("usage", "error", "code", "token_ids", "prompt_token_ids", "completion_tokens"),
    *("prompt_tokens", "finish_reason"),
)
VALUES = st.recursive(
    st.none() | st.integers(-1, 3) | st.text(max_size=2) | st.just(float("inf")) | st.just([100]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=3), st.booleans())
def test_no_answer_breaks_the_client(chunks: list[Any], resumed: bool) -> None:
    # JSON has no infinity, but 1e999 is one
    texts = [json.dumps(chunk).replace("Infinity", "1e999") for chunk in chunks]
    data = chat_stream({"return_token_ids": True, "stream_options": {}})
    first = streaming(data[: data.index(b" is ")])
    answers = iter([first] if resumed else [])
    play = Play(lambda _: next(answers, None) or streaming(sse(*texts)))
    assert play.error is not None or isinstance(play.events[-1], Finished)


def test_nesting_does_not_break_it() -> None:
    deep = b"data: " + b"[" * 100_000 + b"\n\n"
    assert isinstance(Play(lambda _: streaming(deep)).error, NoAnswerError)
    assert isinstance(Play(lambda _: refusing(400, b"[" * 50_000)).error, RefusedError)


def test_what_the_caller_says_goes_first() -> None:
    body = {"messages": [], "seed": 3, "stream_options": {"include_usage": False}}
    (opened,) = Play(whole, body=body).opened
    assert opened.body["seed"] == 3 and not opened.body["stream_options"]["include_usage"]


def _call(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [fields]}, "token_ids": [9]}]}


def test_tool_calls_go_on_too() -> None:
    first = sse(
        _call(index=0, id="c1", function={"name": "look", "arguments": ""}),
        _call(index=0, function={"arguments": '{"at":'}),
    )
    usage = {"prompt_tokens": 1, "completion_tokens": 3}
    rest = _call(index=0, id="c2", function={"name": "look", "arguments": " 5}"}) | {"usage": usage}
    rest["choices"][0]["finish_reason"] = "tool_calls"
    play = Play(in_turn(streaming(first), streaming(sse(rest))))
    finished = play.events[-1]
    assert isinstance(finished, Finished) and finished.reason == "tool_calls"
    assert finished.tool_calls == (ToolCall("c1", "look", '{"at": 5}'),)
    assert play.opened[1].body["resume_output_ids"] == [9, 9]
    assert [e for e in play.events if isinstance(e, ToolCallDelta)] == [
        ToolCallDelta(0, "c1", "look", ""),
        ToolCallDelta(0, "", "", '{"at":'),
        ToolCallDelta(0, "", "", " 5}"),
    ]


def test_a_lost_connection_is_named() -> None:
    play = Play(lambda _: [Connected(), Broken("the connection was lost: reset")], attempts=1)
    assert str(play.error) == "the connection was lost: reset (attempts: 1)"
