"""API keys over every route of the app."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.errors import ConfigError
from paceline.http.keys import ApiKey, KeyRing, parse_key_file
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"
# the same first twenty characters
TWIN = "user-key-0123456789-twin"
KEYS = (
    ApiKey.of("alice", "user", USER),
    ApiKey.of("bob", "user", TWIN),
    ApiKey.of("root", "admin", ADMIN),
)


@pytest.fixture(scope="module")
async def guarded(anyio_backend: str) -> AsyncIterator[FastAPI]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    yield create_app(client, ServerConfig(api_keys=KEYS))
    await client.close()


@pytest.fixture(scope="module")
async def http(guarded: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(guarded) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


BAD: list[dict[str, Any]] = [
    {},
    bearer(""),
    bearer("wrong"),
    bearer(USER[:-1]),
    bearer(USER + "x"),
    bearer("' OR '1'='1"),
    bearer("x" * 100_000),
    {"Authorization": USER},
    {"Authorization": f"Basic {USER}"},
    {"x-api-key": "wrong"},
    {"Authorization": b"Bearer \xff"},
]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"])
async def test_a_refusal_asks_for_a_key(http: httpx.AsyncClient, path: str) -> None:
    """Every route times every caller: ``tests/security/test_auth_matrix.py``."""
    for headers in BAD:
        answer = await http.get(path, headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert USER not in answer.text and answer.headers["x-request-id"]
    for key in (USER, ADMIN):
        for headers in (bearer(key), {"x-api-key": key}):
            assert (await http.get(path, headers=headers)).status_code != 401


async def test_errors_have_the_shape_of_their_api(http: httpx.AsyncClient) -> None:
    error = (await http.post("/v1/chat/completions", json={})).json()["error"]
    assert error["type"] == "AuthenticationError" and error["code"] == 401
    error = (await http.post("/v1/messages", json={})).json()
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error"


async def test_stored_responses_are_their_owners(http: httpx.AsyncClient) -> None:
    body = {"input": "hi", "max_output_tokens": 2}
    made = (await http.post("/v1/responses", json=body, headers=bearer(USER))).json()
    path = f"/v1/responses/{made['id']}"
    assert (await http.get(path, headers=bearer(USER))).status_code == 200
    for key in (TWIN, ADMIN):
        assert (await http.get(path, headers=bearer(key))).status_code == 404
        assert (await http.delete(path, headers=bearer(key))).status_code == 404
        goes_on = {**body, "previous_response_id": made["id"]}
        answer = await http.post("/v1/responses", json=goes_on, headers=bearer(key))
        assert answer.status_code == 404


async def test_the_tenant_is_the_key(guarded: FastAPI, http: httpx.AsyncClient) -> None:
    """A user cannot speak for somebody else to the fair policies; an admin (a gateway) can."""
    seen: list[str] = []
    client: Any = guarded.state.service.client
    original = client.generate

    def spy(request: Any, sink: Any = None) -> Any:
        seen.append(request.tenant)
        return original(request, sink)

    client.generate = spy
    try:
        for key in (USER, ADMIN):
            headers = bearer(key) | {"x-llm-d-inference-fairness-id": "carol"}
            body = chat_body(max_tokens=1, user="dave")
            await http.post("/v1/chat/completions", json=body, headers=headers)
            await http.post("/v1/chat/completions", json=body, headers=bearer(key))
            body = chat_body(max_tokens=1)
            await http.post("/v1/chat/completions", json=body, headers=bearer(key))
    finally:
        client.generate = original
    assert seen == ["alice"] * 3 + ["carol", "dave", "root"]


def test_a_key_file() -> None:
    digest = hashlib.sha256(USER.encode()).hexdigest()
    (key,) = parse_key_file(f"# keys\n\nalice user {digest} # hers\n", "keys")
    assert key == KEYS[0] and USER not in repr(KEYS)
    ring = KeyRing([key])
    assert ring.check("/v1/models", {"authorization": f"Bearer {USER}"}) == key
    for text, says in (
        ("alice user", "line 1"),
        (f"alice user {digest[:-1]}", "line 1"),
        (f"alice boss {digest}", "'boss'"),
        (f"a/b user {digest}", "'a/b'"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            parse_key_file(text, "keys")
        assert digest not in str(error.value)
    with pytest.raises(ConfigError, match="alice occurs twice"):
        KeyRing([key, key])
    with pytest.raises(ConfigError, match="8 to 512 characters, got 3"):
        ApiKey.of("x", "user", "abc")


async def test_without_keys_nobody_is_asked(anyio_backend: str) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig())) as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    await client.close()
