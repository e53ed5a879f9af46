"""Fields that nothing reads, and those that other servers call otherwise."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IGNORED = "x-paceline-ignored-fields"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(temperature=0),
    COMPLETIONS: {"prompt": "One", "temperature": 0},
}


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_nothing_reads_is_named(http: httpx.AsyncClient, url: str, stream: bool) -> None:
    body = BODIES[url] | {"stream": stream, "max_tokens": 2}
    plain = await http.post(url, json=body)
    assert IGNORED not in plain.headers
    odd = {"max_token": 3, "snörkel\r\nx: y": 1, "z" * 500: 2}
    answer = await http.post(url, json=body | odd)
    assert answer.status_code == 200
    names = answer.headers[IGNORED]
    assert names.startswith("max_token, sn\\xf6rkel\\r\\nx: y, zzz") and len(names) < 200
    many = await http.post(url, json=body | {f"odd{number}": 1 for number in range(500)})
    assert len(many.headers[IGNORED].split(", ")) == 16


NOTHING_SAID: dict[str, Any] = {"annotations": [], "refusal": None, "audio": None}
# url, fields and what the header names of them
INSIDE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"stream": True, "stream_options": {"include_usages": True}},
     "stream_options.include_usages"),
    (CHAT, {"speculation": {"max_tokens": 0, "tokens": 3}}, "speculation.tokens"),
    (COMPLETIONS, {"speculation": {"k": 3}, "odd": 1}, "speculation.k, odd"),
    (CHAT, {"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "boolean"}, "name": "n", "strict": True, "shape": 1}}},
        "response_format.json_schema.shape",
    ),
    (
        CHAT,
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "weight": 2}]},
            {"role": "assistant", "content": "b", "wieght": 2} | NOTHING_SAID,
            {"role": "user", "content": "c"},
        ]},
        "messages[0].content[0].weight, messages[1].wieght",
    ),
    ("/v1/responses", {"input": "a", "store": False, "text": {"verbosity": "low"},
                       "reasoning": {"summary": "auto"}}, "text.verbosity, reasoning.summary"),
    (
        "/v1/messages",
        {"max_tokens": 2, "metadata": {"user_id": "u", "odd": 1}, "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "odd": 1}]}]},
        "messages[0].content[0].odd, metadata.odd",
    ),
    (
        "/v1/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}],
         "system": [{"type": "text", "text": "b", "zz": 1}],
         "tools": [{"name": "f", "input_schema": {"type": "object"}, "zz": 1}],
         "tool_choice": {"type": "auto", "zz": 1}},
        "system[0].zz, tools[0].zz, tool_choice.zz",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "a"}], "output_config": {
            "format": {"type": "json_schema", "schema": {"type": "boolean"}, "zz": 1}}},
        "output_config.format.zz",
    ),
    (
        "/v1/responses",
        {"store": False, "input": [{"role": "user", "zz": 1, "content": [
            {"type": "input_text", "text": "a", "zz": 1}]}],
         "tools": [{"type": "function", "name": "f", "zz": 1}]},
        "input[0].zz, input[0].content[0].zz, tools[0].zz",
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a", "odd": 1}]},
     "messages[0].odd"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "odd": 1}], "stream": False},
     "messages[0].odd"),
    ("/api/show", {"odd": 1, "verbose": True}, "verbose, odd"),
    ("/tokenize", {"prompt": "a", "odd": 1}, "odd"),
    ("/tokenize", {"content": "a", "odd": 1}, "odd"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "odd": 1}, "odd"),
    ("/detokenize", {"tokens": [65], "odd": 1}, "odd"),
    ("/apply-template", {"messages": [{"role": "user", "content": "a"}], "odd": 1}, "odd"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "fields", "named"), INSIDE)
async def test_what_nothing_reads_is_named_inside_objects_and_everywhere(
    http: httpx.AsyncClient, url: str, fields: dict[str, Any], named: str
) -> None:
    body = BODIES.get(url, {}) | fields
    if url in BODIES:
        body |= {"max_tokens": 2}
    answer = await http.post(url, json=body)
    assert (answer.status_code, answer.headers.get(IGNORED)) == (200, named), answer.text


@pytest.mark.parametrize(("url", "fields", "named"), INSIDE)
async def test_a_strict_server_refuses_that_too(
    url: str, fields: dict[str, Any], named: str
) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig(strict_fields=True))) as http:
        answer = await http.post(url, json=BODIES.get(url, {}) | fields)
    assert answer.status_code == 400
    assert any(name in answer.text for name in named.split(", "))
    assert "--strict-fields" in answer.text


async def test_a_strict_server_refuses_it() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig(strict_fields=True))) as http:
        for url, body in BODIES.items():
            assert (await http.post(url, json=body | {"max_tokens": 1})).status_code == 200
            answer = await http.post(url, json=body | {"max_token": 1, "zzz": 2})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "'max_token' (did you mean 'max_tokens'?), 'zzz';" in error["message"]
            assert error["param"] == "max_token"
        sampling = {"max_tokens": 1, "temperatur": 1}
        tokens = {"token_ids": [70], "sampling_params": sampling}
        answer = await http.post("/inference/v1/generate", json=tokens)
        assert "did you mean 'temperature'?" in answer.text
    await client.close()


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"n_predict": -1, "max_tokens": 4}, {"max_tokens": 4}),
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 9, "min_new_tokens": 5}, {"max_tokens": 9, "min_tokens": 5}),
        (
            {"max_tokens": 30, "repeat_penalty": 3.0},
            {"max_tokens": 30, "repetition_penalty": 3.0},
        ),
        (
            {"max_tokens": 30, "regex": "[a-f]{5}"},
            {"max_tokens": 30, "structured_outputs": {"regex": "[a-f]{5}"}},
        ),
        (
            {"max_tokens": 30, "grammar": 'root ::= "yes" | "no"'},
            {"max_tokens": 30, "structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        ),
        (
            {"max_tokens": 30, "ebnf": 'root ::= "yes" | "no"'},
            {"max_tokens": 30, "structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        ),
        (
            {"max_tokens": 60, "json_schema": {"type": "array", "items": {"type": "integer"}}},
            {
                "max_tokens": 60,
                "structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}},
            },
        ),
    ],
)
async def test_other_names_mean_the_same(
    http: httpx.AsyncClient, url: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    asked = await http.post(url, json=BODIES[url] | theirs)
    assert asked.status_code == 200 and IGNORED not in asked.headers, asked.text
    said, wanted = asked.json(), (await http.post(url, json=BODIES[url] | ours)).json()
    assert said["choices"] == wanted["choices"]
    assert said["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict=3 and max_tokens=4 mean the same here"),
        ({"regex": "a", "ebnf": "b"}, "mean the same here"),
        ({"n_predict": "many"}, "max_tokens must be an integer"),
        ({"mirostat": 2}, "mirostat=2 is not served yet: this server does not do Mirostat"),
        ({"dry_multiplier": 0.8}, "DRY sampling"),
        ({"n_probs": 5}, "logprobs does it"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], says: str
) -> None:
    answer = await http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | fields)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
