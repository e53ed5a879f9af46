"""One stream made of several: wherever they were cut, the caller reads what an uncut one says."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.streams.openai_stream import OpenAIStreamRelay
from tests.gateway.fault_server import chat_chunks
from tests.gateway.helpers import make_relay

WORDS = ("It", ' said "token_ids":[1]', " \n\n", "é", ' {"error": 1}', ".")
WHOLE = b"".join(chat_chunks(WORDS))


def chunks_of(data: bytes) -> list[Any]:
    found = [event[6:] for event in data.split(b"\n\n") if event.startswith(b"data: ")]
    return [event if event == b"[DONE]" else json.loads(event) for event in found]


def text_of(data: bytes) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks_of(data)
        if chunk != b"[DONE]"
        for choice in chunk["choices"]
    )


def relayed(cut: int, **fields: Any) -> tuple[bytes, OpenAIStreamRelay]:
    """A stream of which an engine sent ``cut`` bytes, and another the rest."""
    relay = OpenAIStreamRelay(num_choices=1, hide_usage=False, **fields)
    relay.begin_attempt()
    out = relay.feed(WHOLE[:cut])
    out += relay.end_attempt()
    if relay.done:
        return out, relay
    assert relay.failed
    resume = relay.resume_ids()
    first = len(resume[0] or ()) if resume else 0
    relay.begin_attempt()
    out += relay.feed(b"".join(chat_chunks(WORDS[first:], first_id=first, created=2)))
    return out + relay.end_attempt(), relay


def test_cut_at_every_byte() -> None:
    for cut in range(len(WHOLE)):
        _check(cut)


def _check(cut: int) -> None:
    out, relay = relayed(cut)
    assert relay.done and relay.failed is None
    assert text_of(out) == "".join(WORDS)
    told = chunks_of(out)
    assert told[-1] == b"[DONE]" and told.count(b"[DONE]") == 1
    assert len({chunk["id"] for chunk in told[:-1]}) == 1
    usages = [chunk["usage"] for chunk in told[:-1] if "usage" in chunk]
    assert [usage["completion_tokens"] for usage in usages] == [len(WORDS)]
    roles = [c for chunk in told[:-1] for c in chunk["choices"] if "role" in c["delta"]]
    assert len(roles) == 1


@given(
    st.lists(st.integers(0, len(WHOLE)), max_size=12),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.sampled_from([b"", b"data:\n\n", b"event: ping\ndata: {}\n\n", b"\n"]),
)
def test_in_whatever_parts_it_comes(cuts: list[int], line_end: bytes, quiet: bytes) -> None:
    data = b"\xef\xbb\xbf" + WHOLE.replace(b"\n\n", b"\n\n" + quiet).replace(b"\n", line_end)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    relay = OpenAIStreamRelay(num_choices=1, hide_usage=False, hide_ids=False)
    relay.begin_attempt()
    out = b"".join(
        relay.feed(data[a:b]) for a, b in pairwise(places)
    ) + relay.end_attempt()  # fmt: skip
    assert out == WHOLE and relay.done


def test_names_and_ids_are_the_first_engines() -> None:
    out, _ = relayed(len(b"".join(chat_chunks(WORDS)[:3])), model="alias")
    told = chunks_of(out)[:-1]
    assert {(c["id"], c["created"], c["model"]) for c in told} == {("chat-1", 1, "alias")}


def test_text_that_looks_like_ids_stays() -> None:
    out, _ = relayed(len(WHOLE))
    assert "token_ids" in text_of(out)
    assert all("token_ids" not in chunk["choices"][0] for chunk in chunks_of(out)[:-2])


def test_choices_end_one_by_one() -> None:
    def event(index: int, word: str, ids: list[int], reason: str | None = None) -> bytes:
        choice = {
            "index": index, "delta": {"content": word}, "finish_reason": reason, "token_ids": ids,
        }  # fmt: skip
        more = {"prompt_token_ids": [1]} if not ids else {}
        return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}).encode() + b"\n\n"

    relay = OpenAIStreamRelay(num_choices=2)
    relay.begin_attempt()
    relay.feed(event(0, "", []) + event(0, "a", [5]) + event(1, "b", [6], "stop"))
    assert relay.end_attempt() == b"" and relay.failed
    assert relay.resume_ids() == [[5], None]
    relay.begin_attempt()
    out = relay.feed(event(0, "c", [7], "length"))
    assert text_of(out + relay.end_attempt()) == "c" and relay.done
    assert relay.num_output_tokens == 3


def test_tokens_without_ids_cannot_be_resumed() -> None:
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    relay.feed(b"".join(chat_chunks(WORDS, ids=False)[:3]))
    assert relay.emitted and relay.resume_ids() is None


def test_an_engines_own_error_ends_its_attempt() -> None:
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    out = relay.feed(chat_chunks(WORDS)[0] + b'data: {"error": {"message": "x"}}\n\n')
    assert b"error" not in out and relay.failed == "the engine reported an error"
    assert b'"message": "x"' in relay.failure_event


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    relay.feed(b"data: " + b"x" * (1 << 20))
    assert relay.failed and "more than" in relay.failed


@pytest.mark.parametrize(
    ("path", "said", "end", "fails"),
    [
        ("/v1/messages", "content_block_delta", "message_stop", "error"),
        ("/v1/responses", "response.output_text.delta", "response.completed", "response.failed"),
    ],
)
def test_other_apis_go_out_from_what_says_something(
    path: str, said: str, end: str, fails: str
) -> None:
    def event(name: str) -> bytes:
        return f'event: {name}\ndata: {{"type":"{name}"}}\n\n'.encode()

    relay = make_relay(path)
    relay.begin_attempt()
    assert relay.feed(event("response.created")) == b""
    assert relay.resume_ids() is None
    relay.begin_attempt()
    both = event("response.created") + event(said)
    assert relay.feed(both) == both and relay.emitted
    assert relay.feed(b": comment\n\n") == b": comment\n\n"
    assert relay.feed(event(end)) == event(end) and relay.done
    other = make_relay(path)
    other.begin_attempt()
    assert other.feed(event(fails)) == b"" and other.failed
    assert other.failure_event == event(fails)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("path", "delta", "marks", "end"),
    [
        (
            "/v1/messages",
            "content_block_delta",
            ("message_stop", "event: error", "error"),
            "message_stop",
        ),
        (
            "/v1/responses",
            "response.output_text.delta",
            ("response.completed", "response.failed", "event: error"),
            "response.incomplete",
        ),
    ],
)
def test_what_a_text_says_is_no_event(
    path: str, delta: str, marks: tuple[str, ...], end: str, named: bool
) -> None:
    """An answer about these APIs has the names of their events in it."""

    def event(kind: str, text: str) -> bytes:
        head = f"event: {kind}\n" if named else ""
        return f"{head}data: {json.dumps({'type': kind, 'delta': {'text': text}})}\n\n".encode()

    relay = make_relay(path)
    relay.begin_attempt()
    parts = [event(delta, mark) for mark in marks]
    for part in parts:
        assert relay.feed(part) == part
        assert not relay.done and relay.failed is None and relay.emitted
    assert relay.num_output_tokens == len(marks)
    assert relay.feed(event(end, "")) == event(end, "") and relay.done
    fails = make_relay(path)
    fails.begin_attempt()
    assert fails.feed(event("error", "why")) == b"" and fails.failed
