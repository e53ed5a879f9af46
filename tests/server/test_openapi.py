"""The OpenAPI document is true: every route, what it takes, every answer it may give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI

from paceline.engine.local import LocalEngineClient
from paceline.http.keys import OPEN_PATHS, ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import batches_of
from paceline.server.openapi.document import EXAMPLES, request_schemas
from paceline.server.settings.config import BatchConfig
from tests.server.helpers import chat_body, connect, events
from tests.server.live_process import LiveServer, live_server
from tests.server.schemathesis_run import check_document, null_server_settings
from tests.server.test_api_doc import RULES, documented


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    found: dict[str, Any] = app.openapi()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, {**schema, "components": document["components"]})


async def test_it_is_what_the_server_sends(
    http: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    # tuples and numbers as JSON has them
    assert (await http.get("/openapi.json")).json() == json.loads(json.dumps(document))
    assert document["openapi"].startswith("3.1")


async def test_every_operation_has_an_answer_and_its_faults(document: dict[str, Any]) -> None:
    assert len(list(operations(document))) >= 20
    for method, path, operation in operations(document):
        responses = operation["responses"]
        assert "422" not in responses and "500" in responses, (method, path)
        if "200" in responses:
            (content,) = list(responses["200"]["content"].values())[:1]
            assert content["schema"], (method, path)
        for status, response in responses.items():
            assert response["content"], (method, path, status)
            assert "X-Request-Id" in response["headers"], (method, path, status)
        if "requestBody" in operation:
            assert {"400", "413", "429"} <= set(responses), (method, path)
        # told by the connection, or to a name that the server does not answer to
        assert {"408", "431", "503"} <= set(responses), (method, path)
        assert ("421" in responses) == (path not in OPEN_PATHS), (method, path)


async def test_no_name_leads_nowhere(document: dict[str, Any]) -> None:
    def refs(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "$ref":
                    yield item
                yield from refs(item)
        elif isinstance(value, list):
            for item in value:
                yield from refs(item)

    found = set(refs(document))
    assert len(found) > 20
    for ref in found:
        assert ref.removeprefix("#/components/schemas/") in document["components"]["schemas"], ref
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", EXAMPLES)
async def test_examples_are_served(http: httpx.AsyncClient, path: str, app: FastAPI) -> None:
    document = app.openapi()
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    assert body["example"] == EXAMPLES[path]
    check(document, body["schema"], EXAMPLES[path])
    answer = await http.post(path, json=EXAMPLES[path])
    assert answer.status_code == 200, answer.text
    content = operation["responses"]["200"]["content"]
    check(document, content["application/json"]["schema"], answer.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams_are_what_it_says(http: httpx.AsyncClient, path: str, app: FastAPI) -> None:
    document = app.openapi()
    extra = {"stream": True, "logprobs": True if "chat" in path else 1, "n": 2}
    answer = await http.post(path, json=EXAMPLES[path] | extra)
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    done, data = content["schema"]["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    found = events(answer.text)
    assert len(found) >= 2
    for event in found:
        check(document, data["contentSchema"], event)


FIELD_SCHEMAS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    path: lambda schema: schema["properties"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                 "/inference/v1/generate", "/api/chat", "/api/generate", "/completion",
                 "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
}  # fmt: skip


@pytest.mark.parametrize("path", FIELD_SCHEMAS)
async def test_its_fields_are_those_of_the_api_page(path: str) -> None:
    told = documented(f"`{path}`")
    assert set(request_schemas(RULES)[path]["properties"]) == told["served"] | told["ignored"]


async def test_it_knows_the_bounds_of_this_server(engine: LocalEngineClient) -> None:
    config = ServerConfig(served_model_names=("a", "b"), max_choices=3, max_prompts=2)
    document = create_app(engine, config).openapi()
    path = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    fields = path["application/json"]["schema"]["properties"]
    assert fields["n"]["maximum"] == 3
    assert fields["model"]["anyOf"][0]["enum"] == ["a", "b"]
    assert fields["max_tokens"]["maximum"] == 511
    assert fields["prompt"]["anyOf"][1]["maxItems"] == 2


async def test_errors_are_what_it_says(engine: LocalEngineClient) -> None:
    keys = (ApiKey.of("u", "user", "user-key-1"), ApiKey.of("a", "admin", "admin-key-1"))
    hosts = ("test", "testserver")
    app = create_app(engine, ServerConfig(api_keys=keys, max_body_bytes=200, allowed_hosts=hosts))
    document = app.openapi()
    user = {"Authorization": "Bearer user-key-1"}
    async with connect(app) as http:
        for method, path, body, headers, status in (
            ("POST", "/v1/chat/completions", chat_body(), {}, 401),
            ("GET", "/metrics", None, user, 403),
            ("POST", "/v1/chat/completions", chat_body(model="x"), user, 404),
            ("POST", "/v1/completions", {"prompt": "x" * 300}, user, 413),
            ("POST", "/v1/messages", {"messages": []}, user, 400),
            ("POST", "/v1/messages", {"messages": []}, {}, 401),
            ("POST", "/v1/embeddings", {"input": "x"}, user, 400),
            ("GET", "/v1/responses/{response_id}", None, user, 404),
            ("GET", "/v1/models", None, {"Host": "else.example"}, 421),
            ("POST", "/v1/messages", {}, {"Host": "else.example"}, 421),
        ):
            answer = await http.request(method, path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            responses = document["paths"][path][method.lower()]["responses"]
            content = responses[str(status)]["content"]["application/json"]
            check(document, content["schema"], answer.json())
            assert answer.headers["x-request-id"]


async def test_files_and_batches_are_what_it_says(
    engine: LocalEngineClient, tmp_path: Path
) -> None:
    """And every id leads where the links say."""
    app = create_app(engine, ServerConfig(batches=BatchConfig(folder=tmp_path)))
    document = app.openapi()
    places = {
        operation["operationId"]: (method, path) for method, path, operation in operations(document)
    }
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}

    async def ask(method: str, path: str, where: str = "", **sent: Any) -> httpx.Response:
        answer = await http.request(method, where or path, **sent)
        assert answer.status_code == 200, (path, answer.text)
        (told,) = document["paths"][path][method.lower()]["responses"]["200"]["content"].items()
        media_type, content = told
        assert answer.headers["content-type"].partition(";")[0] == media_type, path
        if media_type == "application/json":
            check(document, content["schema"], answer.json())
        return answer

    async with connect(app) as http:
        upload = {"data": {"purpose": "batch"}, "files": {"file": ("a", json.dumps(line))}}
        file = (await ask("POST", "/v1/files", **upload)).json()
        links = document["paths"]["/v1/files"]["post"]["responses"]["200"]["links"]
        body = links.pop("batch")["requestBody"] | {"input_file_id": file["id"]}
        batch = (await ask("POST", "/v1/batches", json=body)).json()
        for path in ("/v1/files", "/v1/batches"):
            listed = (await ask("GET", path, f"{path}?limit=1")).json()
            assert listed["data"]
        of_batches = document["paths"]["/v1/batches"]["post"]["responses"]["200"]["links"]
        for found, made in ((of_batches, batch), (links, file)):
            if made is file:
                # a file that a batch still needs is not deleted
                async with asyncio.timeout(30.0):
                    while (await http.get(f"/v1/batches/{batch['id']}")).json()["status"] not in (
                        "completed",
                        "cancelled",
                    ):
                        await asyncio.sleep(0.01)
            for link in found.values():
                method, path = places[link["operationId"]]
                ((name, where),) = link["parameters"].items()
                assert where == "$response.body#/id" and f"{{{name}}}" in path
                await ask(method, path, path.replace(f"{{{name}}}", made["id"]))
        for path, status in (("/v1/files?after=x", 404), ("/v1/batches?limit=0", 400)):
            answer = await http.get(path)
            responses = document["paths"][path.partition("?")[0]]["get"]["responses"]
            assert answer.status_code == status
            check(
                document,
                responses[str(status)]["content"]["application/json"]["schema"],
                answer.json(),
            )
    await batches_of(app).stop()


async def test_allow_names_every_method_of_a_path(http: httpx.AsyncClient) -> None:
    for path, methods in (
        ("/ping", "GET, HEAD, POST"),
        ("/v1/responses/x", "DELETE, GET, HEAD"),
        ("/v1/chat/completions", "POST"),
    ):
        answer = await http.request("OPTIONS", path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, methods)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("openapi") / "log"
    with live_server(log, **null_server_settings(log.parent / "batches")) as server:
        yield server


@pytest.mark.thorough
def test_schemathesis_finds_nothing(live: LiveServer, tmp_path: Path) -> None:
    # the enumerated phase takes a minute: `make test-clients` runs it
    done = check_document(live.url, tmp_path, examples=5, phases="examples,fuzzing,stateful")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Fuzzing (in" in done.stdout and "Stateful (in" in done.stdout
