"""Tools over a live app: forced calls through the grammar, calls in text, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from paceline.server.model_formats.tool_formats import call_schema
from tests.server.helpers import VOCAB, chat_body, connect, events

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096))
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def choice_of(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = chat_body(**{"tools": TOOLS, "max_tokens": 400} | fields)
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def check_calls(calls: list[dict[str, Any]], ids: str = "call_[0-9a-f]{24}") -> None:
    for call in calls:
        assert call["type"] == "function" and re.fullmatch(ids, call["id"])
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert call["function"]["name"] == "now" and isinstance(arguments, dict)
    assert len({call["id"] for call in calls}) == len(calls)


async def test_a_required_call_comes(http: httpx.AsyncClient) -> None:
    for text in ("hi", "what now", "x"):
        choice = await choice_of(
            http, messages=[{"role": "user", "content": text}], tool_choice="required"
        )
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] is None and message["tool_calls"]
        check_calls(message["tool_calls"])


async def test_a_named_tool_is_called_once(http: httpx.AsyncClient) -> None:
    choice = await choice_of(http, tool_choice=NAMED)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    check_calls([call])
    # as OpenAI has it
    assert choice["finish_reason"] == "stop"


async def test_parallel_calls_can_be_turned_off(http: httpx.AsyncClient) -> None:
    for text in "abcdef":
        messages = [{"role": "user", "content": text}]
        fields = {"tool_choice": "required", "parallel_tool_calls": False}
        choice = await choice_of(http, messages=messages, **fields)
        assert len(choice["message"]["tool_calls"]) == 1


async def test_streamed_calls_add_up(http: httpx.AsyncClient) -> None:
    whole = await choice_of(http, tools=TOOLS[:1], tool_choice="required", seed=1)
    body = chat_body(tools=TOOLS[:1], max_tokens=400, tool_choice="required", stream=True, seed=1)
    answer = await http.post("/v1/chat/completions", json=body)
    calls: dict[int, dict[str, Any]] = {}
    reasons = []
    pieces = 0
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            assert not choice["delta"].get("content")
            for call in choice["delta"].get("tool_calls", []):
                known = calls.setdefault(call["index"], {"name": "", "arguments": "", "id": None})
                if "id" in call:
                    assert call["type"] == "function" and known["id"] is None
                    known["id"], known["name"] = call["id"], call["function"]["name"]
                known["arguments"] += call["function"]["arguments"]
                pieces += 1
            reasons.append(choice["finish_reason"])
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    expected = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [{k: c[k] for k in ("name", "arguments")} for c in calls.values()] == expected
    # they came bit by bit
    assert pieces > len(calls)


async def test_auto_finds_calls_in_text_and_leaves_text_alone(http: httpx.AsyncClient) -> None:
    said = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    forced = {"structured_outputs": {"choice": [said]}, "tool_choice": "none"}
    # the same text, once as text (tools not to be called) ...
    choice = await choice_of(http, **forced)
    assert choice["message"]["content"] == said and choice["message"]["tool_calls"] == []
    assert choice["finish_reason"] == "stop"
    # ... and once as the call it is
    ids = list(said.encode())
    bias = {str(token): 100 for token in ids}
    choice = await choice_of(http, logit_bias=bias, max_tokens=5)
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "length"


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param(NAMED, marks=pytest.mark.thorough)],
    ids=["required", "named"],
)
async def test_a_forced_call_that_is_cut_off_leaves_no_markup(parser: str, choice: Any) -> None:
    """Wherever ``max_tokens`` cuts it, streamed or not: no text, and no call without a name."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096))
    async with connect(create_app(client, ServerConfig(tool_call_parser=parser))) as http:
        named = 0
        for count in range(1, 70, 3):
            fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": count}
            whole = await choice_of(http, **fields)
            assert whole["message"]["content"] is None, whole
            named += bool(whole["message"]["tool_calls"])
            answer = await http.post("/v1/chat/completions", json=chat_body(**fields, stream=True))
            deltas = [chunk["choices"][0]["delta"] for chunk in events(answer.text)]
            assert not any(delta.get("content") for delta in deltas), deltas
        # some were cut off before their name, some after
        assert 0 < named < 23
    await client.close()


async def test_a_schema_and_tools_together() -> None:
    """The model answers in the schema, or calls: in a list without a mark, as a grammar writes no
    special tokens."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096))
    schema = {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    answers = made = 0
    async with connect(create_app(client, ServerConfig(tool_call_parser="mistral"))) as http:
        for text in "abcdefgh":
            messages = [{"role": "user", "content": text}]
            bias = {str(ord("[")): 60} if text in "aceg" else {}
            fields: dict[str, Any] = {"messages": messages, "logit_bias": bias}
            choice = await choice_of(http, **fields, response_format=wanted)
            if choice["finish_reason"] == "length":
                continue
            calls = choice["message"]["tool_calls"]
            check_calls(calls, ids="[A-Za-z0-9]{9}")
            made += len(calls)
            if not calls:
                answers += 1
                assert json.loads(choice["message"]["content"])["ok"] == 1
    await client.close()
    assert answers and made


async def test_what_only_looks_like_a_reference_stays_as_it_is(http: httpx.AsyncClient) -> None:
    """A value that is asked for, and a property by the name of a keyword."""
    wanted = {"$ref": "#/components/x"}
    properties = {"link": {"const": wanted}, "const": {"$ref": "#/$defs/unit"}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["link", "const"],
        "$defs": {"unit": {"enum": ["C"]}},
    }
    tool = {"type": "function", "function": {"name": "open", "parameters": parameters}}
    choice = await choice_of(http, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"link": wanted, "const": "C"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice"),
        ({"tool_choice": "auto", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
            },
            "tools[0].function.parameters",
        ),
    ],
)
async def test_what_cannot_be_had_is_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    body = chat_body(**{"tools": TOOLS} | fields)
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_conversation_with_calls_and_results_goes_on(http: httpx.AsyncClient) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": '{"zone": "UTC"}'},
    }
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 3, "return_token_ids": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    prompt = ByteTokenizer().decode(answer["prompt_token_ids"])
    assert "noon" in prompt and '"weather"' in prompt


class Toolless(ByteTokenizer):
    """Its template has no place for tools."""

    @property
    def chat_template_source(self) -> str:
        return "{{ messages }}"


@pytest.fixture(scope="module")
async def toolless(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=4096)
    client = null_client(backend, tokenizer=Toolless())
    async with connect(create_app(client, ServerConfig(tool_call_parser="mistral"))) as http:
        yield http
    await client.close()


async def test_a_template_without_tools_still_shows_them(toolless: httpx.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True}
    answer = (await toolless.post("/v1/chat/completions", json=body)).json()
    prompt = ByteTokenizer().decode(answer["prompt_token_ids"])
    assert prompt.startswith("system\nBe kind.\n\nYou may call functions")
    assert 'Wait.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\nnoon\n</tool_response>" in prompt


async def test_the_format_can_be_chosen(toolless: httpx.AsyncClient) -> None:
    """--tool-call-parser mistral: the raw text is a list."""
    body = chat_body(tools=TOOLS, tool_choice=NAMED, max_tokens=300, return_token_ids=True)
    choice = (await toolless.post("/v1/chat/completions", json=body)).json()["choices"][0]
    text = ByteTokenizer().decode(choice["token_ids"])
    assert text.startswith('[{"name":"weather","arguments":{') and text.endswith("}]")
    check_calls(choice["message"]["tool_calls"], ids="[A-Za-z0-9]{9}")


@pytest.mark.parametrize(
    ("parameters", "closed"),
    [
        ({"properties": {"a": {"type": "integer"}}}, True),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, False),
        ({"properties": {}, "patternProperties": {"^x": {}}}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
        ({"type": "object"}, False),
        ({}, True),
        (None, True),
    ],
)
def test_arguments_that_are_listed_are_all_there_are(parameters: Any, closed: bool) -> None:
    tool = {"function": {"name": "f", "parameters": parameters}}
    schema = call_schema(tool, "arguments", "#")["properties"]["arguments"]
    assert (schema.get("additionalProperties") is False) == closed
