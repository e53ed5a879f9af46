"""A body taken apart and put together again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidRequestError
from paceline.gateway.bodies import read_body

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
        (b'{"a":' + b"[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_what_no_engine_would_take(text: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_body(text)


def test_prompts_are_counted() -> None:
    assert read_body(b'{"prompt":["a","b"],"n":2}').num_choices == 4
    assert read_body(b'{"prompt":[[1],[2],[3]]}').num_choices == 3
    assert read_body(b'{"prompt":[1,2,3]}').num_choices == 1
    assert read_body(b'{"prompt":"abc","max_completion_tokens":5}').max_tokens == 5
    assert read_body(b'{"slo":{"ttft_ms":500}}').slo.ttft == 0.5


@pytest.mark.parametrize(
    ("fields", "made", "most"),
    [
        ({}, 1024, 1024),
        ({"max_tokens": 7}, 7, 7),
        # engines of an older API go by the one, newer ones by the other
        ({"max_completion_tokens": 1, "max_tokens": 9000}, 1, 9000),
        ({"max_completion_tokens": 50, "max_tokens": 20}, 50, 50),
        # no limit, to some
        ({"max_completion_tokens": 1, "max_tokens": -1}, 1, 1024),
        ({"max_tokens": 3, "n_predict": 500}, 3, 500),
        ({"max_tokens": 3, "n_predict": "odd"}, 3, 3),
    ],
)
def test_of_several_limits_the_largest_may_count(
    fields: dict[str, Any], made: int, most: int
) -> None:
    body = read_body(json.dumps({"model": "m", **fields}).encode())
    assert (body.max_tokens, body.most_tokens) == (made, most)
