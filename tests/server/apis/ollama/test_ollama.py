"""Ollama's API, as its clients read it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.errors import InvalidRequestError
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.apis.ollama import serving
from paceline.server.apis.ollama.protocol import parse_ollama_chat
from paceline.server.apis.ollama.routes import REFUSED_ROUTES
from paceline.server.apis.openai.answers import UsageCount
from paceline.server.apis.openai.chat_deltas import ChatPiece
from paceline.server.protocol.requests import ChatRequest
from paceline.server.protocol.tool_calls import Call
from tests.server.helpers import VOCAB, chat_prompt, connect, expected_text
from tests.server.test_api_doc import RULES

CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": "hi"}]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check_counts(last: dict[str, Any], prompt: list[int], count: int) -> None:
    assert last["done"] is True and last["done_reason"] == "length"
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(prompt), count)
    assert 0 <= last["eval_duration"] <= last["total_duration"]
    assert last["prompt_eval_duration"] <= last["total_duration"] and last["load_duration"] == 0
    assert last["created_at"].endswith("Z") and last["model"] == "tiny"


async def test_a_chat_is_that_of_the_other_apis(http: httpx.AsyncClient) -> None:
    prompt = chat_prompt("hi")
    _, text = expected_text(prompt, 12)
    body = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 12}}
    streamed = await http.post(CHAT, json=body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *parts, last = lines(streamed.text)
    assert {part["done"] for part in parts} == {False}
    assert "".join(part["message"]["content"] for part in parts) == text
    assert last["message"] == {"role": "assistant", "content": ""}
    check_counts(last, prompt, 12)
    whole = (await http.post(CHAT, json=body | {"stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": text}
    check_counts(whole, prompt, 12)


async def test_a_raw_prompt_has_no_template(http: httpx.AsyncClient) -> None:
    said = {"prompt": "One", "options": {"num_predict": 5}, "stream": False}
    raw = (await http.post(GENERATE, json=said | {"raw": True})).json()
    completion = {"prompt": "One", "max_tokens": 5}
    other = (await http.post("/v1/completions", json=completion)).json()
    assert raw["response"] == other["choices"][0]["text"]
    assert raw["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    chat = (await http.post(GENERATE, json=said | {"system": "Be brief."})).json()
    assert chat["prompt_eval_count"] > raw["prompt_eval_count"] and "message" not in chat
    # until the model or the context ends
    long = (await http.post(GENERATE, json={"prompt": "One", "raw": True, "stream": False})).json()
    assert long["eval_count"] > 100


async def test_tools_come_whole_and_go_back_without_ids(http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
    ]
    body = {"messages": history, "tools": [tool], "format": "", "options": {"num_predict": 9}}
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert lines(answer.text)[-1]["done"] is True


def test_thoughts_of_earlier_turns_reach_the_template() -> None:
    said = {"role": "assistant", "content": "b", "thinking": "c"}
    parsed = parse_ollama_chat({"messages": [*MESSAGES, said, *MESSAGES]}, RULES)
    assert isinstance(parsed.asked, ChatRequest)
    kept = parsed.asked.template.messages[len(MESSAGES)]
    assert (kept["content"], kept["reasoning"]) == ("b", "c")
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].reasoning must be a string"):
        parse_ollama_chat({"messages": [*MESSAGES, said | {"thinking": 3}]}, RULES)


async def test_calls_come_at_the_end_as_objects(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's words are chosen here."""
    asked = parse_ollama_chat({"messages": MESSAGES}, RULES).asked
    assert asked is not None
    count = UsageCount(1, asked.options)
    calls = [Call("now", "id", text) for text in ('{"zone": "CET"}', '{"zone')]

    async def pieces(*_: object) -> AsyncIterator[ChatPiece]:
        yield ChatPiece(0, "", ["Let me see."], calls[:1], (1,), (), None, None, count)
        yield ChatPiece(0, "", [], calls, (2,), (), "tool_calls", None, count)

    monkeypatch.setattr(serving, "chat_pieces", pieces)
    text, made, last = lines((await http.post(CHAT, json={"messages": MESSAGES})).text)
    assert text["message"]["content"] == "Let me see." and not text["done"]
    # what a limit has cut off is an empty object
    assert made["message"]["tool_calls"] == [
        {"function": {"name": "now", "arguments": {"zone": "CET"}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    assert last["done"] and last["done_reason"] == "stop"
    whole = (await http.post(CHAT, json={"messages": MESSAGES, "stream": False})).json()
    assert whole["message"]["tool_calls"] == made["message"]["tool_calls"]
    assert whole["message"]["content"] == "Let me see."


async def test_a_format_is_kept_to(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for form in (schema, "json"):
        body = {"messages": MESSAGES, "format": form, "stream": False}
        limited = body | {"options": {"num_predict": 60, "temperature": 0}}
        text = (await http.post(CHAT, json=limited)).json()["message"]["content"]
        assert text.startswith("{")
        if form is schema:
            assert isinstance(json.loads(text)["a"], bool)


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"model": "other"}, "'other' does not exist"),
        (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role must be one of system"),
        (CHAT, {"messages": [{"role": "user", "images": ["x"]}]}, "images are not served"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat=2 is not served"),
        (CHAT, {"options": {"tempratur": 1}}, "options.'tempratur' is unknown"),
        (CHAT, {"options": {"temperature": -1}}, "temperature"),
        (CHAT, {"options": {"num_ctx": 10**6}}, "num_ctx=1000000: the maximum context length"),
        (CHAT, {"think": True}, "think=True: this model's chat template has no thinking"),
        (CHAT, {"format": "xml"}, "format must be json or a schema"),
        (CHAT, {"suffixx": "a"}, "'suffixx': not served in /api/chat"),
        (GENERATE, {"suffix": "b"}, "suffix is not served"),
        (GENERATE, {"context": [1, 2]}, "context is not served"),
        (GENERATE, {"raw": True, "system": "s"}, "system is not put into a raw prompt"),
    ],
)
async def test_faults_are_named_in_its_shape(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], says: str
) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    answer = await http.post(path, json=asked | fields)
    assert answer.status_code == (404 if "model" in fields else 400)
    assert says in answer.json()["error"], answer.text


async def test_what_changes_nothing(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "stream": False, "options": {"num_predict": 3, "num_ctx": 64}}
    body["options"] |= {"num_gpu": 1, "mirostat": 0, "typical_p": 1.0}  # type: ignore[operator]
    body |= {"model": "tiny:latest", "keep_alive": "5m", "think": False, "tools": []}
    assert (await http.post(CHAT, json=body)).json()["eval_count"] == 3
    for path, nothing in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""})):
        for keep, reason in ((0, "unload"), ("10m", "load")):
            (line,) = lines((await http.post(path, json=nothing | {"keep_alive": keep})).text)
            assert line["done"] and line["done_reason"] == reason


async def test_models(http: httpx.AsyncClient) -> None:
    tag, alias = (await http.get("/api/tags")).json()["models"]
    assert alias["name"] == "alias"
    assert tag["name"] == tag["model"] == "tiny"
    (loaded,) = (await http.get("/api/ps")).json()["models"]
    shown = (await http.post("/api/show", json={"model": "tiny:latest"})).json()
    assert loaded["context_length"] == shown["model_info"]["paceline.context_length"]
    assert "completion" in shown["capabilities"]
    assert (await http.post("/api/show", json={"model": "no"})).status_code == 404
    assert "version" in (await http.get("/api/version")).json()
    for (method, path), why in REFUSED_ROUTES.items():
        answer = await http.request(method, path, json={"model": "x"})
        assert (answer.status_code, answer.json()["error"]) == (404, why)


async def test_keys_and_limits_are_those_of_all_doors() -> None:
    key = ApiKey.of("ada", "user", "a-key-of-ada")
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig(api_keys=(key,)))) as http:
        body = {"messages": MESSAGES, "options": {"num_predict": 2}}
        refused = await http.post(CHAT, json=body)
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        headers = {"Authorization": "Bearer a-key-of-ada"}
        assert (await http.post(CHAT, json=body, headers=headers)).status_code == 200
    await client.close()
