"""Anthropic's API over a live app."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, chat_prompt, connect, expected_text

TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096), model="tiny")
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12} | fields


async def post(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json=body(**fields))
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def typed_events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


async def test_a_message(http: httpx.AsyncClient) -> None:
    message = await post(http)
    prompt = chat_prompt("hi")
    tokens, text = expected_text(prompt, 12)
    assert message["content"] == [{"type": "text", "text": text}]
    assert message["type"] == "message" and message["role"] == "assistant"
    assert message["id"].startswith("msg-") and message["model"] == "tiny"
    assert message["stop_reason"] == "max_tokens" and message["stop_sequence"] is None
    usage = message["usage"]
    assert usage["output_tokens"] == len(tokens)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)


async def test_the_system_prompt_blocks_and_prefill_reach_the_template(
    http: httpx.AsyncClient,
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "It is"},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counted = await http.post(
        "/v1/messages/count_tokens", json={"messages": messages, "system": system}
    )
    rendered = ByteTokenizer().render_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "It is"},
        ],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    ids = ByteTokenizer().encode(rendered, add_special_tokens=False)
    assert counted.json() == {"input_tokens": len(ids)}
    message = await post(http, messages=messages, system=system)
    assert sum(message["usage"][k] for k in ("input_tokens", "cache_read_input_tokens")) == len(ids)


async def test_stop_reasons(http: httpx.AsyncClient) -> None:
    # a grammar makes the null backend end a turn
    wanted = {"format": {"type": "json_schema", "schema": {"const": "ab"}}}
    message = await post(http, output_config=wanted)
    assert message["stop_reason"] == "end_turn" and message["content"][0]["text"] == '"ab"'
    message = await post(http, output_config=wanted, stop_sequences=["b"])
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == "b"
    assert message["content"] == [{"type": "text", "text": '"a'}]


async def test_tools(http: httpx.AsyncClient) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 300}
    message = await post(http, **fields)
    assert message["stop_reason"] == "tool_use"
    use = message["content"][0]
    assert use["type"] == "tool_use" and use["name"] == "weather"
    assert use["input"]["city"] in ("Oslo", "Rome")
    named = await post(http, **fields | {"tool_choice": {"type": "tool", "name": "weather"}})
    assert named["stop_reason"] == "tool_use" and len(named["content"]) == 1
    answered = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": message["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use["id"], "content": "12 degrees"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    assert (await post(http, tools=[TOOL], messages=answered))["content"]


async def test_streams(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/messages", json=body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = typed_events(answer.text)
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    text = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
    assert text == expected_text(chat_prompt("hi"), 12)[1]
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 12


async def test_tool_calls_stream(http: httpx.AsyncClient) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    answer = await http.post("/v1/messages", json=body(stream=True, **fields | {"max_tokens": 200}))
    found = typed_events(answer.text)
    (start,) = [e for e in found if e["type"] == "content_block_start"]
    assert start["content_block"]["name"] == "weather" and start["content_block"]["input"] == {}
    parts = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert json.loads("".join(parts))["city"] in ("Oslo", "Rome")
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": None}, "messages is missing"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
async def test_errors_in_anthropics_shape(
    http: httpx.AsyncClient, fields: dict[str, Any], says: str
) -> None:
    answer = await http.post("/v1/messages", json=body(**fields))
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


async def test_an_unknown_model(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/messages", json=body(model="nobody"))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


async def test_chat_and_messages_ask_the_model_the_same(http: httpx.AsyncClient) -> None:
    chat = await http.post("/v1/chat/completions", json=chat_body(max_tokens=12))
    message = await post(http)
    assert chat.json()["choices"][0]["message"]["content"] == message["content"][0]["text"]
