"""OpenAI's responses over a live app: objects, typed events, storage, background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.http.errors import HttpError
from paceline.server import ServerConfig, create_app
from paceline.server.generation.response_store import ResponseStore, StoredResponse
from tests.server.apis.test_anthropic import typed_events
from tests.server.helpers import VOCAB, chat_prompt, connect, expected_text

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=4096, step_time=0.001)
    client = null_client(backend, model="tiny")
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def create(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"input": "hi", "max_output_tokens": 12} | fields
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def test_a_response(http: httpx.AsyncClient) -> None:
    response = await create(http, temperature=0.5, metadata={"k": "v"})
    tokens, text = expected_text(chat_prompt("hi"), 12)
    (item,) = response["output"]
    assert item["type"] == "message" and item["role"] == "assistant"
    (part,) = item["content"]
    assert part["type"] == "output_text" and part["text"] == text and part["annotations"] == []
    assert response["status"] == item["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == len(tokens)
    assert response["usage"]["total_tokens"] == len(chat_prompt("hi")) + len(tokens)
    assert response["object"] == "response" and response["id"].startswith("resp_")
    assert response["temperature"] == 0.5 and response["metadata"] == {"k": "v"}


async def test_a_schema_completes(http: httpx.AsyncClient) -> None:
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": {"const": [1]}}}
    response = await create(http, text=wanted, max_output_tokens=200)
    assert response["status"] == "completed" and response["incomplete_details"] is None
    assert json.loads(response["output"][0]["content"][0]["text"]) == [1]


async def test_events(http: httpx.AsyncClient) -> None:
    body = {"input": "hi", "max_output_tokens": 12, "stream": True}
    found = typed_events((await http.post("/v1/responses", json=body)).text)
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == expected_text(chat_prompt("hi"), 12)[1] == found[-4]["text"]
    last = found[-1]["response"]
    assert found[0]["response"]["id"] == last["id"] and found[0]["response"]["output"] == []
    stored = (await http.get(f"/v1/responses/{last['id']}")).json()
    assert stored == last


async def test_calls_stream_and_their_results_go_on(http: httpx.AsyncClient) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    body = {"input": "hi", "max_output_tokens": 300, "stream": True, **fields}
    found = typed_events((await http.post("/v1/responses", json=body)).text)
    deltas = [e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"]
    (done,) = [e for e in found if e["type"] == "response.function_call_arguments.done"]
    assert "".join(deltas) == done["arguments"]
    last = found[-1]["response"]
    (call,) = last["output"]
    assert call["type"] == "function_call" and call["name"] == "weather"
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12 degrees"}
    going_on = await create(http, input=[result], previous_response_id=last["id"])
    assert going_on["previous_response_id"] == last["id"]
    spelt_out = await create(http, input=[{"role": "user", "content": "hi"}, call, result])
    assert going_on["output"][0]["content"] == spelt_out["output"][0]["content"]
    assert going_on["usage"]["input_tokens"] == spelt_out["usage"]["input_tokens"]


async def test_a_conversation_goes_on_without_the_old_instructions(http: httpx.AsyncClient) -> None:
    first = await create(http, instructions="Be brief.")
    text = first["output"][0]["content"][0]["text"]
    second = await create(http, input="more", previous_response_id=first["id"])
    whole = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": text}]},
        {"role": "user", "content": "more"},
    ]
    assert (
        second["usage"]["input_tokens"]
        == (await create(http, input=whole))["usage"]["input_tokens"]
    )


async def test_what_is_not_stored_is_not_there(http: httpx.AsyncClient) -> None:
    kept, gone = await create(http), await create(http, store=False)
    assert (await http.get(f"/v1/responses/{kept['id']}")).json() == kept
    assert (await http.get(f"/v1/responses/{gone['id']}")).status_code == 404
    deleted = (await http.delete(f"/v1/responses/{kept['id']}")).json()
    assert deleted == {"id": kept["id"], "object": "response", "deleted": True}
    assert (await http.get(f"/v1/responses/{kept['id']}")).status_code == 404
    again = {"input": "x", "previous_response_id": kept["id"]}
    assert (await http.post("/v1/responses", json=again)).status_code == 404


async def test_background(http: httpx.AsyncClient) -> None:
    response = await create(http, background=True)
    assert response["status"] == "queued"
    path = f"/v1/responses/{response['id']}"
    for _ in range(500):
        await asyncio.sleep(0.01)
        now = (await http.get(path)).json()
        if now["status"] not in ("queued", "in_progress"):
            break
    assert now["status"] == "incomplete"
    assert now["output"][0]["content"][0]["text"] == expected_text(chat_prompt("hi"), 12)[1]


async def test_a_response_that_is_deleted_while_it_runs_stays_deleted(
    http: httpx.AsyncClient,
) -> None:
    fields = {"max_output_tokens": 3000, "structured_outputs": {"regex": "A{3000}"}}
    response = await create(http, background=True, **fields)
    path = f"/v1/responses/{response['id']}"
    async with asyncio.timeout(5):
        while (await http.get(path)).json()["status"] != "in_progress":
            await asyncio.sleep(0.01)
    assert (await http.delete(path)).json()["deleted"] is True
    async with asyncio.timeout(5):
        while (await http.get("/load")).json() != {"server_load": 0}:
            await asyncio.sleep(0.01)
    assert (await http.get(path)).status_code == 404


async def test_what_has_no_answer_is_not_gone_on_from(http: httpx.AsyncClient) -> None:
    """An empty conversation in its place would go unseen."""
    fields = {"max_output_tokens": 3000, "structured_outputs": {"regex": "A{3000}"}}
    response = await create(http, background=True, **fields)
    path = f"/v1/responses/{response['id']}"
    after = {"input": "and then?", "previous_response_id": response["id"], "max_output_tokens": 3}
    refused = await http.post("/v1/responses", json=after)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "previous_response_id" and "no answer" in error["message"]
    assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    refused = await http.post("/v1/responses", json=after)
    assert refused.status_code == 400 and "is cancelled" in refused.text


async def test_cancel(http: httpx.AsyncClient) -> None:
    fields = {"max_output_tokens": 3000, "background": True}
    response = await create(http, **fields, structured_outputs={"regex": "A{3000}"})
    path = f"/v1/responses/{response['id']}"
    async with asyncio.timeout(5):
        while (await http.get(path)).json()["status"] != "in_progress":
            await asyncio.sleep(0.005)
    assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await http.get(path)).json()["status"] == "cancelled"
    load = (await http.get("/load")).json()
    assert load == {"server_load": 0}
    done = await create(http)
    cancelled = await http.post(f"/v1/responses/{done['id']}/cancel")
    assert cancelled.json()["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": None}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "/not "),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "stream": True}, "background needs"),
        ({"conversation": "c"}, "conversation is not served"),
        ({"max_tool_calls": 3}, "max_tool_calls is not served"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], says: str) -> None:
    answer = await http.post("/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_faults_are_those_of_the_callers_fields(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    """Not of the chat body that they become."""
    answer = await http.post("/v1/responses", json={"input": "hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "max_completion_tokens" not in error["message"]


async def test_log_probabilities(http: httpx.AsyncClient) -> None:
    response = await create(http, top_logprobs=1, max_output_tokens=3)
    told = response["output"][0]["content"][0]["logprobs"]
    assert len(told) == 3 and all(entry["logprob"] == 0.0 for entry in told)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_split_characters(http: httpx.AsyncClient, stream: bool) -> None:
    """Each token is half a character here, and only the second half makes a text."""
    body = {
        "input": "hi",
        "max_output_tokens": 20,
        "structured_outputs": {"regex": "é{6}"},
        "include": ["message.output_text.logprobs"],
        "stream": stream,
    }
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = answer.json() if not stream else typed_events(answer.text)[-1]["response"]
    (part,) = response["output"][0]["content"]
    assert part["text"] == "éééééé"
    assert len(part["logprobs"]) == response["usage"]["output_tokens"] >= 12
    told = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert told.startswith("éééééé".encode())
    if stream:
        deltas = [e for e in typed_events(answer.text) if e["type"].endswith("text.delta")]
        pieces = [entry for event in deltas for entry in event["logprobs"]]
        assert len(pieces) >= 12 and pieces == part["logprobs"][: len(pieces)]


async def test_a_stream_that_breaks_ends_with_an_event_in_its_place() -> None:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.002, poison_token=7)
    client = null_client(backend, pipeline_depth=1)
    body = {"input": "hi", "stream": True, "structured_outputs": {"regex": "abc\x07d"}}
    async with connect(create_app(client, ServerConfig())) as http:
        answer = await http.post("/v1/responses", json=body)
    await client.close()
    found = typed_events(answer.text)
    assert found[0]["type"] == "response.created" and found[-1]["type"] == "error"
    assert found[-1]["code"] == "server_error" and "poison" in found[-1]["message"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_the_store_is_bounded() -> None:
    def response(number: int, text: str = "") -> StoredResponse:
        return StoredResponse({"id": f"r{number}", "text": text}, [], "me", [])

    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(5):
        store.put(response(number))
    assert len(store) == 3 and store.get("r4", "me")
    with pytest.raises(HttpError):
        store.get("r1", "me")
    with pytest.raises(HttpError):
        store.get("r4", "somebody else")
    store.put(response(9, "x" * 9_965))
    assert len(store) == 1
