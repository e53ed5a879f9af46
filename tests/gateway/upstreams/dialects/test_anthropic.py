"""Chat completions from an engine of Anthropic's API, read by both vendors' own types."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParams
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline.errors import InvalidRequestError
from paceline.gateway.requests.body import read_body
from paceline.gateway.settings.prices import Used
from paceline.gateway.streams.openai_stream import OpenAIStreamRelay
from paceline.gateway.streams.usage import used_by
from paceline.gateway.upstreams.dialects import AnthropicDialect, map_error, map_status
from paceline.gateway.upstreams.dialects.anthropic_answer import AnthropicStream, chat_answer
from paceline.gateway.upstreams.dialects.anthropic_request import messages_request
from tests.gateway.helpers import CHAT
from tests.gateway.upstreams.dialects.samples import (
    ANTHROPIC_ERRORS,
    ANTHROPIC_TOOL_STREAM,
    ANTHROPIC_WHOLE,
    anthropic_events,
    joined,
)

WORDS = ("Once", " upon", " a time")
DIALECT = AnthropicDialect()


def sent(**fields: Any) -> dict[str, Any]:
    """What becomes of a chat's request, as the vendor's own type reads it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    body = read_body(json.dumps(chat).encode())
    assert DIALECT.cannot(CHAT, body) == ""
    found: dict[str, Any] = json.loads(DIALECT.body(CHAT, body, {"model": "claude-x"}))
    pydantic.TypeAdapter(MessageCreateParams).validate_python(found)
    return found


def fed(stream: AnthropicStream, data: bytes) -> bytes:
    return b"".join(stream.feed(data))


def chunks(data: bytes) -> list[Any]:
    events = [event for event in data.split(b"\n\n") if event.startswith(b"data: ")]
    return [e[6:] if e == b"data: [DONE]" else json.loads(e[6:]) for e in events]


@pytest.mark.parametrize("events", [anthropic_events(WORDS), ANTHROPIC_TOOL_STREAM])
def test_the_samples_are_what_the_vendors_types_say(events: tuple[bytes, ...]) -> None:
    adapter: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
    for event in events:
        if b"ping" not in event[:20]:
            adapter.validate_json(event.partition(b"data: ")[2])
    Message.model_validate(ANTHROPIC_WHOLE)


def test_a_stream_of_text() -> None:
    told = chunks(fed(AnthropicStream(), joined(anthropic_events(WORDS))))
    assert told.pop() == b"[DONE]"
    found = [ChatCompletionChunk.model_validate(chunk) for chunk in told]
    assert "".join(c.choices[0].delta.content or "" for c in found if c.choices) == "".join(WORDS)
    assert {chunk.id for chunk in found} == {"msg_1"}
    assert found[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in found if c.choices][-1] == "stop"
    usage = found[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (25, 3)


def test_a_stream_with_thoughts_and_calls() -> None:
    told = chunks(fed(AnthropicStream(), joined(ANTHROPIC_TOOL_STREAM)))[:-1]
    found = [ChatCompletionChunk.model_validate(chunk) for chunk in told]
    deltas = [chunk.choices[0].delta for chunk in found if chunk.choices]
    assert "".join(d.content or "" for d in deltas) == "Let me look."
    thoughts = [chunk["choices"][0]["delta"].get("reasoning") for chunk in told if chunk["choices"]]
    assert "".join(filter(None, thoughts)) == "They ask for the weather."
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        assert call.function is not None
        at = calls.setdefault(call.index, [call.id or "", call.function.name or "", ""])
        at[2] += call.function.arguments or ""
    assert calls == {
        0: ["toolu_1", "get_weather", '{"location": "San Francisco, CA"}'],
        1: ["toolu_2", "get_time", "{}"],
    }
    usage = found[-1].usage
    assert usage is not None and usage.prompt_tokens == 472 + 100 + 8
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 100


@given(st.lists(st.integers(0, len(joined(ANTHROPIC_TOOL_STREAM))), max_size=8))
def test_a_stream_in_whatever_parts_it_comes(cuts: list[int]) -> None:
    data = joined(ANTHROPIC_TOOL_STREAM)
    places = sorted({0, len(data), *cuts})
    stream = AnthropicStream()
    parts = b"".join(fed(stream, data[a:b]) for a, b in pairwise(places))
    told, whole = chunks(parts), chunks(fed(AnthropicStream(), data))
    for chunk in (*told[:-1], *whole[:-1]):
        chunk["created"] = 0
    assert told == whole


def test_a_whole_answer() -> None:
    found = ChatCompletion.model_validate_json(chat_answer(json.dumps(ANTHROPIC_WHOLE).encode()))
    (choice,) = found.choices
    assert choice.message.content == "Let me look." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"location": "SF"}
    assert found.usage is not None and found.usage.prompt_tokens == 572
    with pytest.raises(Exception, match="id"):
        chat_answer(b'{"type":"message"}')


def test_counts_that_cannot_be_are_believed_no_further_than_the_gateways_own() -> None:
    usage = {"input_tokens": 10**30, "cache_read_input_tokens": -7, "output_tokens": -5}
    whole = chat_answer(json.dumps({**ANTHROPIC_WHOLE, "usage": usage}).encode())
    stream = AnthropicStream()
    start = {**ANTHROPIC_WHOLE, "content": [], "usage": usage}
    events = [{"type": "message_start", "message": start}, {"type": "message_stop"}]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    last = chunks(fed(stream, data))[-2]
    for told in (json.loads(whole)["usage"], last["usage"]):
        assert (told["prompt_tokens"], told["completion_tokens"]) == (10**9, 0)
        assert told["prompt_tokens_details"]["cached_tokens"] == 0
    # and what is charged is what the caller reads
    assert used_by(CHAT, whole) == Used(10**9, 0, 0)
    relay = OpenAIStreamRelay(num_choices=1)
    relay.begin_attempt()
    relay.feed(fed(AnthropicStream(), data))
    assert (relay.prompt_tokens, relay.num_output_tokens) == (10**9, 0)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"),
        ("tool_use", "tool_calls"), ("refusal", "content_filter"), ("pause_turn", "stop"),
        ("model_context_window_exceeded", "length"),
    ],
)  # fmt: skip
def test_reasons(reason: str, finish: str) -> None:
    told = chunks(fed(AnthropicStream(), joined(anthropic_events(WORDS, reason))))
    assert [c["choices"][0]["finish_reason"] for c in told[:-1] if c["choices"]][-1] == finish
    whole = json.loads(chat_answer(json.dumps(ANTHROPIC_WHOLE | {"stop_reason": reason}).encode()))
    assert whole["choices"][0]["finish_reason"] == finish


def test_an_error_in_a_stream() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'
    assert chunks(fed(AnthropicStream(), error)) == [{"error": {"type": "overloaded_error"}}]
    with pytest.raises(Exception, match=r"malformed|invalid"):
        fed(AnthropicStream(), b"data: {oops\n\n")
    # new kinds of events may come
    assert fed(AnthropicStream(), b'data: {"type":"new_thing","x":1}\n\n') == b""


def test_a_plain_request() -> None:
    assert sent(max_tokens=7, temperature=1.7, top_p=0.5, stop="x", user="u", stream=True) == {
        "model": "claude-x",
        "max_tokens": 7,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 1.0,
        "top_p": 0.5,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": True,
    }
    assert sent()["max_tokens"] == 1024
    assert sent(max_completion_tokens=9, max_tokens=8)["max_tokens"] == 9


def test_a_conversation_with_calls_and_pictures() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "And kind."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "and?"},
    ]
    found = sent(messages=messages)
    assert found["system"] == "Be brief.\nAnd kind."
    user, assistant, results, last = found["messages"]
    assert [part["type"] for part in user["content"]] == ["text", "image", "image"]
    assert user["content"][1]["source"] == {
        "type": "base64", "media_type": "image/png", "data": "iVBORw0K",
    }  # fmt: skip
    assert assistant["content"] == [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    # results of calls that were made at once are one message
    assert [part["tool_use_id"] for part in results["content"]] == ["a", "b"]
    assert results["role"] == "user" and last["content"] == [{"type": "text", "text": "and?"}]


def test_tools_and_formats() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
    }
    found = sent(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert found["tools"] == [
        {"name": "f", "description": "d", "input_schema": schema, "strict": True}
    ]
    assert found["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    named = {"type": "function", "function": {"name": "f"}}
    assert sent(tools=[tool], tool_choice=named)["tool_choice"] == {"type": "tool", "name": "f"}
    assert sent(tools=[tool], tool_choice="none")["tool_choice"] == {"type": "none"}
    assert "tool_choice" not in sent(tools=[{"type": "function", "function": {"name": "g"}}])
    formed = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert sent(response_format=formed)["output_config"] == {
        "format": {"type": "json_schema", "schema": schema}
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "one choice"),
        ({"logprobs": True}, "no logprobs"),
        ({"response_format": {"type": "json_object"}}, "no response_format json_object"),
        ({"functions": []}, "no functions"),
        ({"audio": {}}, "no audio"),
    ],
)
def test_what_it_could_not_do_is_not_sent_there(fields: dict[str, Any], words: str) -> None:
    body = read_body(json.dumps({"messages": [], **fields}).encode())
    assert words in DIALECT.cannot(CHAT, body)
    assert "has no /v1/embeddings" in DIALECT.cannot("/v1/embeddings", body)
    assert DIALECT.cannot("/v1/messages", body) == ""


def test_what_it_does_not_honour_is_named() -> None:
    body = read_body(b'{"messages":[],"seed":1,"presence_penalty":0.5,"logit_bias":null,"n":1}')
    assert DIALECT.ignored(CHAT, body) == "seed,presence_penalty"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("x", "must be a list"),
        ([3], r"messages\[0\] must be an object"),
        ([{"role": "x"}], "role is 'x'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "type 'input_audio'"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{oops"}}]}],
            "arguments that are not JSON",
        ),
    ],
)
def test_messages_that_make_no_sense(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        messages_request({"messages": messages}, 5)


@pytest.mark.parametrize(("status", "kind"), ANTHROPIC_ERRORS.items())
def test_errors(status: int, kind: str) -> None:
    said = {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": "req_1"}
    body = json.dumps(said).encode()
    assert map_error("/v1/messages", status, body) == body
    error = json.loads(map_error(CHAT, status, body))["error"]
    assert error["message"] == "why" and error["type"] == kind and error["param"] is None
    # those of the gateway's own account, and Anthropic's own, are others for other clients
    told = {401: 502, 402: 502, 403: 502, 529: 503}
    assert map_status(CHAT, status) == told.get(status, status)
    assert map_status("/v1/messages", 529) == 529
    back = json.loads(map_error("/v1/messages", status, json.dumps({"error": error}).encode()))
    assert back["type"] == "error" and back["error"] == {"type": kind, "message": "why"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Bad Gateway at 10.0.0.1</html>", "the engine answered with status 502"),
        (b'{"error":"model not found"}', "model not found"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"object":"error","message":"old","code":400}', "old"),
    ],
)
def test_errors_of_no_known_shape(body: bytes, message: str) -> None:
    for path in (CHAT, "/v1/messages"):
        assert json.loads(map_error(path, 502, body))["error"]["message"] == message
