"""A body taken apart and put together again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequestError
from paceline.gateway.requests.body import read_body
from paceline.gateway.upstreams.dialects.anthropic import AnthropicDialect
from tests.gateway.helpers import CHAT

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "x", "é", "tools", "stop"]), _VALUES))
def test_what_is_not_changed_is_kept(fields: dict[str, object]) -> None:
    body = read_body(json.dumps(fields | {"model": "m"}).encode())
    encoded = json.loads(body.encode({"model": "other", "seed": 7, "x": None}))
    expected = {name: value for name, value in fields.items() if name != "x"}
    assert encoded == expected | {"model": "other", "seed": 7}


_ROUTED = ("model", "stream", "n", "max_tokens", "seed", "priority")
_ROUTED_VALUES = st.sampled_from(
    ["null", "true", "false", "0", "3", "-1", "2.0", "1e0", '"a"', '"b"', '"\\u0061"', "[]", "{}"]
)


def spelled(name: str, escaped: set[int]) -> str:
    """A key with some of its characters written as escapes."""
    return "".join(f"\\u{ord(c):04x}" if i in escaped else c for i, c in enumerate(name))


@given(
    st.lists(
        st.tuples(
            st.builds(spelled, st.sampled_from(_ROUTED), st.sets(st.integers(0, 9))),
            _ROUTED_VALUES,
        ),
        max_size=6,
    )
)
def test_what_is_routed_is_what_the_engine_reads(fields: list[tuple[str, str]]) -> None:
    """However its names are written, and however often: a request that was let through for one
    model is never another one's."""
    text = "{" + ",".join(f'"{key}":{value}' for key, value in fields) + "}"
    try:
        body = read_body(text.encode())
    except InvalidRequestError:
        return
    sent = body.encode({})
    # no parser has a choice
    names = [name for name, _ in json.loads(sent, object_pairs_hook=list)]
    assert len(names) == len(set(names)) and b"\\u" not in sent.replace(b'"\\u0061"', b"")
    told = json.loads(sent)
    assert (told.get("model") or "") == body.model
    assert (told.get("stream") or False) == body.stream
    assert max(1, told.get("n") or 1) == body.n
    assert told.get("seed") == body.seed
    assert (told.get("priority") or 0) == body.priority


@pytest.mark.parametrize(
    "value",
    [b'"\\ud800"', b'"a\\udc00b"', b'"\xff"', b'"\xed\xa0\x80"', b'"\\x"', b'{"\\ud800":1}'],
)
def test_a_name_that_is_no_text_is_refused(value: bytes) -> None:
    for text in (b'{"model":%b}', b'{"model":"a","model":%b}', b'{"mod\\u0065l":%b}'):
        with pytest.raises(InvalidRequestError):
            read_body(text % value)


def test_a_byte_order_mark_is_passed_over() -> None:
    body = read_body(b'\xef\xbb\xbf{"model": "m", "stream": true}')
    assert body.model == "m" and body.stream
    assert body.encode({}) == b'{"model":"m","stream":true}'


def test_a_field_that_is_there_twice_becomes_one() -> None:
    body = read_body(b'{"model":"a","stream":true,"model":"b"}')
    assert body.model == "b" and body.encode({}).count(b'"model"') == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[1]", "must be a JSON object"),
        (b'{"a":', "not valid JSON"),
        (b'{"n":"3"}', "n must be an integer, got '3'"),
        (b'{"stream":1}', "stream must be true or false, got 1"),
        (b'{"n":1e999}', "n must be an integer, and cannot be read: .*out of range"),
        (b'{"stream_options":{"x":1e999}}', "stream_options cannot be read: .*out of range"),
        (b'{"slo":{"ttft_ms":1e999}}', "slo cannot be read: .*out of range"),
        (b'{"slo":"\xff"}', "slo cannot be read"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_what_no_engine_would_take(text: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_body(text)


def test_what_an_engine_of_another_dialect_cannot_be_told() -> None:
    dialect = AnthropicDialect()
    for text in (b'{"temperature":1e999}', b'{"messages":[{"role":"user","content":"\xff"}]}'):
        with pytest.raises(InvalidRequestError, match=r"(temperature|messages) cannot be read"):
            dialect.body("/v1/chat/completions", read_body(text), {})


def test_prompts_are_counted() -> None:
    assert read_body(b'{"prompt":["a","b"],"n":2}').num_choices == 4
    assert read_body(b'{"prompt":[[1],[2],[3]]}').num_choices == 3
    assert read_body(b'{"prompt":[1,2,3]}').num_choices == 1
    assert read_body(b'{"prompt":"abc","max_completion_tokens":5}').max_tokens == 5
    assert read_body(b'{"slo":{"ttft_ms":500}}').slo.ttft == 0.5


@pytest.mark.parametrize(
    ("path", "fields", "made", "most"),
    [
        (CHAT, {}, 1024, None),
        (CHAT, {"max_tokens": 7}, 7, 7),
        # engines of an older API go by the one, newer ones by the other
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 9000}, 1, 9000),
        (CHAT, {"max_completion_tokens": 50, "max_tokens": 20}, 50, 50),
        # no limit, to some
        (CHAT, {"max_completion_tokens": 1, "max_tokens": -1}, 1, None),
        (CHAT, {"max_tokens": 3, "n_predict": -1}, 3, None),
        (CHAT, {"max_tokens": 3, "n_predict": 500}, 3, 500),
        (CHAT, {"max_tokens": 3, "n_predict": "odd"}, 3, 3),
        # none that engines read there
        (CHAT, {"max_output_tokens": 5}, 5, None),
        (CHAT, {"n_predict": 5}, 1024, None),
        ("/v1/completions", {"max_completion_tokens": 5}, 5, None),
        ("/v1/responses", {"max_tokens": 5}, 5, None),
        ("/v1/responses", {"max_output_tokens": 6}, 6, 6),
        ("/v1/messages", {"max_tokens": 6, "max_output_tokens": 1}, 6, 6),
    ],
)
def test_of_several_limits_the_largest_may_count(
    path: str, fields: dict[str, Any], made: int, most: int | None
) -> None:
    body = read_body(json.dumps({"model": "m", **fields}).encode())
    assert (body.max_tokens, body.most_tokens(path)) == (made, most)


def test_answers_are_counted_that_are_made_and_not_told() -> None:
    made = [
        read_body(text).num_made
        for text in (b'{"n":2,"best_of":5}', b'{"n":2,"best_of":1}', b'{"best_of":"x"}',
                     b'{"prompt":["a","b"],"best_of":3}')
    ]  # fmt: skip
    assert made == [5, 2, 1, 6]
    assert read_body(b'{"n":2,"best_of":5}').num_choices == 2
