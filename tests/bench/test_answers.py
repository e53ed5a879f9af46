"""Answers from bytes: the dialects of servers, and what is no answer at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.answers import Answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def chat(text: str | None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}
    return {"choices": [choice], "usage": None}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": details}}


def lines(*events: dict[str, Any] | bytes, end: bytes = b"\n\n") -> list[bytes]:
    return [
        b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + end for e in events
    ]


def chunked(parts: list[bytes]) -> list[bytes]:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def fed(parts: list[bytes], *, closed: bool = False) -> Answer:
    """Each part a second after the one before."""
    answer = Answer()
    for at, part in enumerate(parts):
        if not answer.done:
            answer.feed(float(at), part)
    if closed:
        answer.feed(float(len(parts)), b"")
    return answer


def test_a_stream_with_usage() -> None:
    events = lines(
        chat("", role="assistant"), chat("He"), chat("llo"), chat("", "stop"), usage(7, 5, 3),
        b"[DONE]",
    )  # fmt: skip
    answer = fed(chunked(events))
    assert answer.results() == {
        "status": 200,
        "failure": "",
        "detail": "",
        # the role alone is no token, and the head came at 0
        "chunks": (2.0, 3.0),
        "prompt_tokens": 7,
        "output_tokens": 5,
        "cached_tokens": 3,
        "finish_reason": "stop",
    }
    assert answer.complete and answer.reusable


def test_other_dialects() -> None:
    """No usage, no space, carriage returns, comments, completions' text, no [DONE], no length."""
    text = {"choices": [{"text": "a"}]}
    last = {"choices": [{"text": "", "finish_reason": "length"}]}
    parts = [
        HEAD + b"\r\n",
        b": keep-alive\r\n\r\nevent: x\r\n",
        b"data:" + json.dumps(text).encode() + b"\r\n\r\n",
        b"data:" + json.dumps(text).encode() + b"\r\n\r\n",
        b"data:" + json.dumps(last).encode() + b"\r\n\r\n",
    ]
    answer = fed(parts, closed=True)
    found = answer.results()
    assert (found["failure"], found["chunks"], found["output_tokens"]) == ("", (2.0, 3.0), None)
    assert found["finish_reason"] == "length"
    assert not answer.reusable


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls"])
def test_thoughts_and_calls_are_tokens(name: str) -> None:
    answer = fed(chunked(lines(chat(None, **{name: ["x"]}), chat("a", "stop"))))
    assert answer.results()["chunks"] == (1.0, 2.0)


def test_tokens_without_text_came_with_the_end() -> None:
    answer = fed(chunked(lines(chat("", role="assistant"), chat("", "stop"), usage(3, 1))))
    assert answer.results()["chunks"] == (2.0,)
    assert fed(chunked(lines(chat("", "stop")))).results()["failure"] == "no token"


@pytest.mark.parametrize(
    ("parts", "failure", "detail"),
    [
        ([b'HTTP/1.1 429 No\r\nContent-Length: 17\r\n\r\n', b'{"error":"later"}'], "429", "later"),
        ([b'HTTP/1.1 500 No\r\nContent-Length: 28\r\n\r\n', b'{"error":{"message":"ouch"}}'],
         "500", "ouch"),
        ([b'HTTP/1.1 404 No\r\nContent-Length: 17\r\n\r\n{"detail":"gone"}'], "404", "gone"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<html></html"], "no stream", "<html>"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP", ""),
        (chunked(lines(chat("a"), b"{oops")), "not JSON", "{oops"),
        (chunked(lines(chat("a"), b"[1]")), "not JSON", "[1]"),
        (chunked(lines(chat("a"), {"error": {"message": "dead"}})), "error in the stream", "dead"),
        (chunked(lines(chat("a"))), "cut off", "without"),
        (chunked([b"data: " + b"x" * (5 << 20)]), "too long", "bytes"),
    ],
)  # fmt: skip
def test_failures_are_named(parts: list[bytes], failure: str, detail: str) -> None:
    answer = fed(parts)
    found = answer.results()
    assert found["failure"] == failure
    assert detail in found["detail"]
    assert answer.done


def test_a_connection_that_closes() -> None:
    whole = chunked(lines(chat("a"), chat("b", "stop"), b"[DONE]"))
    assert fed([], closed=True).results()["failure"] == "no answer"
    assert fed(whole[:2], closed=True).results()["failure"] == "cut off"
    # all of it came, so closing is no matter
    assert fed(whole, closed=True).results()["failure"] == ""


def test_a_second_answer_does_not_change_the_first() -> None:
    first = b"".join(chunked(lines(chat("a", "stop"), b"[DONE]")))
    answer = fed([first + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"])
    assert answer.results()["status"] == 200
    assert answer.results()["failure"] == ""
    assert not answer.reusable


def test_an_interim_answer_is_passed_over() -> None:
    parts = [b"HTTP/1.1 100 Continue\r\n\r\n", *chunked(lines(chat("a", "stop")))]
    assert fed(parts).results()["failure"] == ""


def test_counts_that_are_none() -> None:
    odd = {"usage": {"prompt_tokens": "7", "completion_tokens": True, "prompt_tokens_details": 3}}
    found = fed(chunked(lines(chat("a", "stop"), odd))).results()
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"]) == (
        None, None, None,
    )  # fmt: skip


KEEP_ALIVES = (
    b"", b"  ", b"{}", b"null", b'{"choices": null}', b'{"choices": [], "error": ""}',
)  # fmt: skip


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n"])
def test_keep_alives_are_no_failures(end: bytes) -> None:
    named = [b"event: ping" + end, b"event: heartbeat\ndata: 12" + end, b"event: x\ndata: y" + end]
    said = lines(chat("a"), *KEEP_ALIVES, chat("b", "stop"), b"[DONE]", end=end)
    for whole in (said, [b"\xef\xbb\xbf" + named[0], *said[:3], *named, *said[3:]]):
        found = fed(chunked(whole)).results()
        assert (found["failure"], len(found["chunks"])) == ("", 2)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"object": "error", "message": "dead"}', b"event: error\ndata: dead",
        b'event: error\ndata: {"message": "dead"}', b'data: {"error": "dead"}',
    ],
)  # fmt: skip
def test_errors_count_until_all_was_said(event: bytes) -> None:
    said = lines(chat("a"), chat("", "stop"))
    found = fed(chunked([said[0], event + b"\n\n", said[1]])).results()
    assert (found["failure"], found["detail"]) == ("error in the stream", "dead")
    whole = chunked([*said, event + b"\n\n", b"data: {oops\n\n", *lines(usage(1, 2))])
    assert fed(whole).results()["output_tokens"] == 2
    # reset, or silent until it was given up
    cut = fed(whole[:4], closed=True)
    assert cut.done and not cut.reusable and cut.results()["failure"] == ""
    late = fed(whole[:4])
    late.fail("timeout", "not done in time")
    assert late.done and late.results()["failure"] == ""


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    """However the network divides the bytes, the words are the same."""
    whole = b"".join(chunked(lines(chat("é"), chat("b", "stop"), usage(1, 2), b"[DONE]")))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found = fed(parts).results()
    assert (found["failure"], len(found["chunks"]), found["output_tokens"]) == ("", 2, 2)


@given(st.binary(max_size=200), st.booleans())
def test_garbage_never_raises(garbage: bytes, in_stream: bool) -> None:
    head = HEAD + b"\r\n" if in_stream else b""
    answer = fed([head + garbage], closed=True)
    found = answer.results()
    assert answer.done
    if not in_stream:
        assert found["failure"]
