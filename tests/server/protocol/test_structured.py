"""Outputs that must look like something: over a live app, on the null backend's odd choices."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.helpers import chat_body, events

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def said(http: httpx.AsyncClient, text: str = "hi", **fields: Any) -> str:
    answer = await http.post("/v1/chat/completions", json=chat_body(text, **fields))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    content: str = choice["message"]["content"]
    return content


async def refused(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=chat_body(**fields))
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_the_schema_holds_whatever_the_prompt(http: httpx.AsyncClient) -> None:
    for text in ("hi", "another", "x" * 50):
        value = json.loads(await said(http, text, response_format=json_schema(PERSON)))
        jsonschema.validate(value, PERSON)


async def test_a_json_object(http: httpx.AsyncClient) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 300}
    # the null backend's choices: a short object for this prompt
    assert isinstance(json.loads(await said(http, "h", **fields)), dict)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
        ({"choice": ["yes", 'a "no"', "måske\n"]}, 'yes|a "no"|måske\n'),
        ({"grammar": 'start: ("a" | "b")~3 "!"'}, "[ab]{3}!"),
        ({"grammar": 'root ::= ("a" | "b") rest\nrest ::= [0-9] "!"'}, "[ab][0-9]!"),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"json": '{"const": [1, 2]}', "disable_any_whitespace": True}, r"\[1,2\]"),
    ],
)
async def test_structured_outputs(
    http: httpx.AsyncClient, wanted: dict[str, Any], pattern: str
) -> None:
    text = await said(http, structured_outputs=wanted)
    assert re.fullmatch(pattern, text), text


async def test_whitespace_can_be_forbidden(http: httpx.AsyncClient) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 6, "maxItems": 6}
    loose = await said(http, structured_outputs={"json": schema})
    tight = await said(http, structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert json.loads(loose) == json.loads(tight) == [1] * 6
    assert " " in loose or "\n" in loose or "\t" in loose or "\r" in loose
    assert tight == "[1,1,1,1,1,1]"


async def test_streams_and_choices_hold_too(http: httpx.AsyncClient) -> None:
    body = chat_body(n=3, stream=True, response_format=json_schema(PERSON))
    answer = await http.post("/v1/chat/completions", json=body)
    texts = ["", "", ""]
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


async def test_completions_take_them_too(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": ["a", "bc"],
        "max_tokens": 64,
        "structured_outputs": {"choice": ["on", "off"]},
    }
    answer = await http.post("/v1/completions", json=body)
    assert all(choice["text"] in ("on", "off") for choice in answer.json()["choices"])


async def test_min_tokens_yields_where_the_grammar_ends(http: httpx.AsyncClient) -> None:
    wanted = {"structured_outputs": {"regex": "a{2,9}"}, "max_tokens": 20}
    assert len(await said(http, min_tokens=7, **wanted)) >= 7
    assert await said(http, min_tokens=15, **wanted) == "a" * 9


async def test_stop_and_length_still_end_it(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=4, structured_outputs={"regex": "a{20}"})
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "aaaa"
    body = chat_body(stop="b", structured_outputs={"regex": "a{3}b{3}"})
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "aaa"
    assert answer["choices"][0]["stop_reason"] == "b"


SCHEMA = "response_format.json_schema.schema"


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def named(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^x{i}_": {} for i in range(count)}}


def arrays(count: int, **bounds: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": {"const": i}, **bounds} for i in range(count)]}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (optional(500), f"{SCHEMA} leaves 2001 ways open"),
        (optional(3000), f"{SCHEMA} leaves 12001 ways open"),
        ({"properties": {"a": {"items": optional(500)}}}, f"{SCHEMA}/properties/a/items leaves"),
        ({"anyOf": [optional(300), optional(300)]}, f"{SCHEMA} leaves 2403 ways"),
        ({"$ref": "#/$defs/d", "$defs": {"d": optional(500)}}, f"{SCHEMA}/$defs/d leaves"),
        (arrays(340), f"{SCHEMA} leaves 2381 ways"),
        (arrays(500, minItems=1), f"{SCHEMA} leaves 2501 ways"),
        (named(129), f"{SCHEMA}/patternProperties: a schema may hold 128"),
        ({"allOf": [named(65), named(64)]}, f"{SCHEMA}/allOf/1/patternProperties: a schema may"),
        ({"anyOf": [named(65), named(64)]}, f"{SCHEMA}/anyOf/1/patternProperties: a schema may"),
    ],
)
async def test_a_schema_that_leaves_too_much_open_is_refused_with_its_place(
    http: httpx.AsyncClient, schema: Any, where: str
) -> None:
    error = await refused(http, response_format=json_schema(schema))
    assert error["message"].startswith(where), error
    assert error["param"] == SCHEMA


@pytest.mark.parametrize(
    "schema",
    [
        optional(495),
        {"anyOf": [optional(240), optional(240)]},
        {**optional(2000), "required": [f"p{i}" for i in range(1600)]},
        arrays(240),
        arrays(360, minItems=1),
        named(128),
        {"enum": list(range(10_000))},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
        {"type": "string", "maxLength": 10**9},
    ],
    ids=lambda schema: str(schema)[:40],
)
async def test_a_large_schema_that_can_be_followed_is(http: httpx.AsyncClient, schema: Any) -> None:
    began = time.monotonic()
    body = chat_body(response_format=json_schema(schema), max_tokens=12)
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    # of compiling and masks, on a machine that has better things to do
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_turns_out_too_open_is_the_requests_fault(
    http: httpx.AsyncClient, stream: bool
) -> None:
    """What no check at the door foresees ends in the middle of the answer."""
    rules = "\n".join(f'r{i}: "x" s{i}\ns{i}: "y" s{i} | "z{i}"' for i in range(1100))
    source = "start: " + " | ".join(f"r{i}" for i in range(1100)) + "\n" + rules
    body = chat_body(structured_outputs={"grammar": source}, max_tokens=9, stream=stream)
    answer = await http.post("/v1/chat/completions", json=body)
    if stream and answer.status_code == 200:
        # the first token was on its way before the second was asked for
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        error = json.loads(events[-2])["error"]
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert "leaves too much open" in error["message"] and error["code"] == 400, error


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, f"{SCHEMA}/properties/a/not"),
        ({"items": {"uniqueItems": True}}, f"{SCHEMA}/items/uniqueItems"),
        ({"anyOf": [{}, {"type": "strng"}]}, f"{SCHEMA}/anyOf/1/type"),
        ({"$ref": "http://example.com/s"}, f"{SCHEMA}/$ref"),
        ({"$ref": "#/$defs/none", "$defs": {}}, f"{SCHEMA}/$ref"),
        ({"type": "string", "format": "weird"}, f"{SCHEMA}/format"),
        ({"type": "string", "pattern": "(?=a)b"}, f"{SCHEMA}/pattern"),
        ({"type": "string", "minLength": -1}, f"{SCHEMA}/minLength"),
        ({"type": "integer", "multipleOf": 10**6}, f"{SCHEMA}/multipleOf"),
        ({"type": "integer", "nullable": True}, f"{SCHEMA}/nullable"),
        ({"x-guidance": {"lenient": True}}, f"{SCHEMA}/x-guidance"),
        ({"items": [{}, {}]}, f"{SCHEMA}/items"),
        ({"enum": []}, f"{SCHEMA}/enum"),
        ({"properties": []}, f"{SCHEMA}/properties"),
        (False, SCHEMA),
        ([1], SCHEMA),
        ("text", SCHEMA),
    ],
)
async def test_a_bad_schema_is_refused_with_its_place(
    http: httpx.AsyncClient, schema: Any, where: str
) -> None:
    error = await refused(http, response_format=json_schema(schema))
    assert error["message"].startswith(where + " "), error
    assert error["param"] == SCHEMA


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "[a"}},
        {"structured_outputs": {"regex": "(" * 70 + ")" * 70}},
        {"structured_outputs": {"regex": "a" * 20_000}},
        {"structured_outputs": {"regex": "a{1,99999999999}"}},
        {"structured_outputs": {"regex": "a(?=b)"}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"grammar": "start: " + "(" * 20_000}},
        {"structured_outputs": {"grammar": 'root ::= "a" other'}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a", ""]}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {"type": "integer", "minimum": 3, "maximum": 2}}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
        {"guided_json": {"type": "object"}},
    ],
)
async def test_what_cannot_be_held_is_refused(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert (await refused(http, **fields))["message"]


async def test_a_slow_grammar_delays_nobody_else(http: httpx.AsyncClient) -> None:
    """One that takes a second or so to compile: others are answered meanwhile."""
    order: list[str] = []

    async def ask(name: str, **fields: Any) -> None:
        await said(http, max_tokens=64, **fields)
        order.append(name)

    slow = {"structured_outputs": {"grammar": 'start: %json {"multipleOf": 99991, "maximum": 9}'}}
    first = asyncio.ensure_future(ask("slow", **slow))
    await asyncio.sleep(0.02)
    await ask("quick", structured_outputs={"choice": ["a"]})
    await first
    assert order == ["quick", "slow"]


async def test_an_abandoned_wait_leaves_nothing(http: httpx.AsyncClient, app: Any) -> None:
    slow = {"structured_outputs": {"grammar": 'start: %json {"multipleOf": 99989, "maximum": 9}'}}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await said(http, **slow)
    assert app.state.service.client.num_unfinished == 0
    assert await said(http, structured_outputs={"choice": ["a"]}) == "a"


async def test_no_token_left_ends_that_request_alone(http: httpx.AsyncClient) -> None:
    body = chat_body(structured_outputs={"regex": "a"}, allowed_token_ids=[98])
    answers = await asyncio.gather(
        http.post("/v1/chat/completions", json=body),
        http.post("/v1/chat/completions", json=chat_body(max_tokens=5)),
    )
    assert [answer.status_code for answer in answers] == [400, 200]
    assert "no token is left" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_left_halfway_is_the_requests_fault(
    http: httpx.AsyncClient, stream: bool
) -> None:
    fields = {"structured_outputs": {"regex": "a{60}b"}, "allowed_token_ids": [97]}
    body = chat_body(**fields, max_tokens=90, stream=stream)
    answer = await http.post("/v1/chat/completions", json=body)
    if stream and answer.status_code == 200:
        # some tokens were on their way before the last was asked for
        told = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        error = json.loads(told[-2])["error"]
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert "no token is left" in error["message"] and error["code"] == 400, error


async def test_allowed_token_ids_and_bad_words(http: httpx.AsyncClient) -> None:
    ids = list(b"abc")
    body = {"prompt": "hi", "max_tokens": 40, "allowed_token_ids": ids}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    assert len(text) == 40 and set(text) == set("abc")
    pairs = {text[i : i + 2] for i in range(len(text) - 1)}
    assert "ab" in pairs
    body["bad_words"] = ["ab"]
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    assert "ab" not in text and len(text) == 40
    for fields in ({"allowed_token_ids": []}, {"allowed_token_ids": [999]}, {"bad_words": [""]}):
        answer = await http.post("/v1/completions", json={"prompt": "hi", **fields})
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("value", [0, 1, "yes", []])
async def test_json_object_is_true_or_false(http: httpx.AsyncClient, value: Any) -> None:
    given = {"structured_outputs": {"json_object": value, "choice": ["a"]}}
    assert "json_object must be true or false" in (await refused(http, **given))["message"]


@pytest.mark.parametrize("kind", ["choice", "regex", "grammar", "json"])
async def test_false_asks_for_nothing_but_is_not_a_grammar(
    http: httpx.AsyncClient, kind: str
) -> None:
    assert "got False" in (await refused(http, structured_outputs={kind: False}))["message"]
