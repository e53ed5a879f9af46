"""Whatever JSON arrives, parsing gives a request or a RequestError: nothing else, and quickly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequestError, RequestError
from paceline.http.fields import decode_object, show
from paceline.server.protocol.body import REFUSED, fields_of
from paceline.server.protocol.generation import ChatBody, CompletionBody
from paceline.server.protocol.requests import RequestRules, parse_chat, parse_completion
from paceline.server.protocol.targets import CLASSES

RULES = RequestRules(
    served_model_names=("m",),
    vocab_size=100,
    max_model_len=64,
    max_choices=4,
    max_prompts=4,
    eos_token_ids=frozenset({2}),
    default_sampling={},
    trust_request_chat_template=True,
    slo_classes=CLASSES,
)

FIELDS = sorted({*fields_of(ChatBody), *fields_of(CompletionBody)})
KEYS = "role content type text tool_calls function name arguments include_usage 1 99 tokenize"

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 130)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "text", "none", "auto", "m", "1", "99", "function"])
)
keys = st.text(max_size=3) | st.sampled_from(KEYS.split())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)


@given(bodies)
def test_any_chat_body(body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    for candidate in (body, body | {"messages": messages}, {"messages": messages} | body):
        try:
            request = parse_chat(dict(candidate), RULES)
        except RequestError as error:
            assert str(error)
            assert error.param in candidate or error.param == "messages"
        else:
            assert 1 <= request.options.n <= 4
            assert all(isinstance(m["content"], str) for m in request.template.messages)


@given(bodies)
def test_any_completion_body(body: dict[str, Any]) -> None:
    for candidate in (body, body | {"prompt": "x"}, body | {"prompt": [[1], [2]]}):
        try:
            request = parse_completion(dict(candidate), RULES)
        except RequestError as error:
            assert error.param in candidate or error.param == "prompt"
        else:
            assert 1 <= len(request.prompts) <= 4
            assert request.options.sampling.max_tokens >= 1


@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(body: bytes) -> None:
    try:
        value = decode_object(body)
    except InvalidRequestError as error:
        assert str(error)
    else:
        assert isinstance(value, dict)


@given(values)
def test_shown_values_are_short_and_on_one_line(value: Any) -> None:
    shown = show([value]) + show(value) + show("x" * 1000 + str(value)) + show(10**5000)
    assert len(shown) < 600
    assert "\n" not in shown


def test_depth_is_bounded_where_it_is_said() -> None:
    def nested(depth: int) -> bytes:
        # the object itself is one level
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert decode_object(nested(64))
    with pytest.raises(InvalidRequestError, match="64"):
        decode_object(nested(65))


def test_refused_fields_take_their_harmless_values() -> None:
    refused = [name for name, f in fields_of(CompletionBody).items() if f.status == REFUSED]
    harmless: dict[str, Any] = dict.fromkeys(refused)
    assert parse_completion({**harmless, "prompt": "x"}, RULES).prompts == ("x",)
    off = {"use_beam_search": False, "bad_words": [], "suffix": "", "best_of": 1}
    assert parse_completion({**off, "prompt": "x"}, RULES).prompts == ("x",)
