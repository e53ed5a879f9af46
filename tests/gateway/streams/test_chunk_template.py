"""Chunks that look like the one before are relayed without being read, and nothing shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.streams import chunks as chunks_module
from paceline.gateway.streams.chunk_template import ChunkTemplate
from paceline.gateway.streams.openai_stream import OpenAIStreamRelay
from tests.gateway.fault_server import chat_chunks
from tests.gateway.helpers import make_relay

HEAD = b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{"content":'
TAIL = b'},"finish_reason":null,"token_ids":['


def event(text: bytes, number: bytes = b"7", end: bytes = b"]}]}\n\n") -> bytes:
    return HEAD + text + TAIL + number + end


def template(ids: list[int]) -> ChunkTemplate:
    data = event(b'"Once"')
    out = data.replace(b',"token_ids":[7]', b"")
    found = ChunkTemplate.of(data[6:-2], out, ids)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "text",
    [b'" upon"', b'"\\n"', b'"\\"token_ids\\":[1]"', b'"\\u00e9"', '"é"'.encode(), b'"\x7f"'],
)
def test_what_looks_alike_is_relayed_and_its_token_noted(text: bytes) -> None:
    ids: list[int] = []
    out = template(ids).relay_event(event(text, b"123"))
    assert out == HEAD + text + b'},"finish_reason":null}]}\n\n' and ids == [123]


@pytest.mark.parametrize(
    "data",
    [
        event(b'""'),
        event(b"null"),
        event(b'"a'),
        event(b'"a"b"'),
        event(b'"a\\"'),
        event(b'"\\x"'),
        event(b'"\\ud83d"'),
        event(b'"\xff"'),
        event(b'"a\nb"'),
        event(b'"a"', b"1,2"),
        event(b'"a"', b""),
        event(b'"a"', b"-1"),
        event(b'"a"', b"9" * 30),
        event(b'"a"', end=b']}],"usage":{}}\n\n'),
        event(b'"a"') + event(b'"b"'),
        event(b'"a"')[:-1],
        event(b'"a"').replace(b"null", b'"stop"'),
        event(b'"a"').replace(b'"index":0', b'"index":1'),
        b": comment\n\n",
        b"data: [DONE]\n\n",
        b"",
    ],
)
def test_what_does_not_is_left_to_who_reads_it_whole(data: bytes) -> None:
    ids: list[int] = []
    assert template(ids).relay_event(data) is None and ids == []


WORDS = st.lists(st.text(max_size=6), min_size=1, max_size=12)
# how an engine writes JSON
STYLES = [
    {"separators": (",", ":"), "ensure_ascii": False},
    {"separators": (",", ":"), "ensure_ascii": True},
    {"separators": (", ", ": "), "ensure_ascii": False},
]


def written(words: list[str], style: dict[str, Any], *, ids: bool, odd: list[int]) -> list[bytes]:
    """A stream in which some chunks are of another kind."""
    found = []
    for number, part in enumerate(chat_chunks(words, ids=ids)):
        if part.startswith(b"data: {"):
            chunk = json.loads(part[6:])
            if number in odd and chunk["choices"]:
                chunk["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -number}]}
            part = b"data: " + json.dumps(chunk, **style).encode() + b"\n\n"
        found.append(part)
    return found


@given(WORDS, st.sampled_from(STYLES), st.booleans(), st.lists(st.integers(0, 12), max_size=3))
def test_nothing_shows_it(
    words: list[str], style: dict[str, Any], ids: bool, odd: list[int]
) -> None:
    parts = written(words, style, ids=ids, odd=odd)
    read, known = (
        make_relay("/v1/chat/completions", num_choices=1, model="alias", note={}) for _ in range(2)
    )
    assert isinstance(read, OpenAIStreamRelay)
    read.begin_attempt()
    read._lessons = 0
    known.begin_attempt()
    for part in parts:
        assert known.feed(part) == read.feed(part)
        assert known.num_output_tokens == read.num_output_tokens
        assert known.resume_ids() == read.resume_ids()
    assert known.done and read.done


@pytest.mark.parametrize("ids", [True, False])
def test_most_chunks_are_not_read(monkeypatch: pytest.MonkeyPatch, ids: bool) -> None:
    read: list[Any] = []
    really = chunks_module._decode
    monkeypatch.setattr(chunks_module, "_decode", _noting(read, really))
    parts = chat_chunks([f" word{n}" for n in range(100)], ids=ids)
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    for part in parts:
        relay.feed(part)
    # the role, a word to learn from, the end and the counts
    assert relay.done and relay.num_output_tokens == 100 and len(read) <= 5


def test_of_streams_that_never_look_alike_little_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[Any] = []
    really = ChunkTemplate.of
    monkeypatch.setattr(ChunkTemplate, "of", _noting(tries, really))
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    for number in range(200):
        relay.feed(event(b'"a"').replace(b'"id":"x"', b'"id":"x%d"' % number))
    assert relay.num_output_tokens == 200 and 0 < len(tries) <= 16


def _noting(calls: list[Any], really: Any) -> Any:
    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return really(*arguments)

    return noted
