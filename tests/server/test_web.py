"""What browsers are told: nothing, unless a flag says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from paceline.engine.local import LocalEngineClient
from paceline.server import ServerConfig, create_app
from paceline.server.keys import ApiKey

from .helpers import chat_body, connect

pytestmark = pytest.mark.anyio
KEY = "alice-key-0123"
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def allowed(answer: httpx.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {k[len(prefix) :]: v for k, v in answer.headers.items() if k.startswith(prefix)}


async def test_by_default_no_page_of_another_origin_may_read(http: httpx.AsyncClient) -> None:
    preflight = await http.options(CHAT, headers=PREFLIGHT)
    assert preflight.status_code == 405 and not allowed(preflight)
    for path in ("/v1/models", "/health", "/metrics"):
        answer = await http.get(path, headers={"Origin": "https://a.example"})
        assert answer.status_code == 200 and not allowed(answer)
    # what a page can send without a preflight is not taken
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"Origin": "https://a.example", "Content-Type": kind}
        answer = await http.post(CHAT, content=b'{"messages": []}', headers=headers)
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]


async def test_an_allowed_origin(engine: LocalEngineClient) -> None:
    config = ServerConfig(
        cors_origins=("https://a.example",), api_keys=(ApiKey.of("alice", "user", KEY),)
    )
    async with connect(create_app(engine, config)) as http:
        # a preflight carries no key
        preflight = await http.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert allowed(preflight)["allow-origin"] == "https://a.example"
        assert "authorization" in allowed(preflight)["allow-headers"]
        assert "allow-credentials" not in allowed(preflight)
        headers = {"Origin": "https://a.example", "Authorization": f"Bearer {KEY}"}
        answer = await http.post(CHAT, json=chat_body(max_tokens=1), headers=headers)
        assert answer.status_code == 200
        assert allowed(answer)["allow-origin"] == "https://a.example"
        exposed = allowed(answer)["expose-headers"]
        assert "x-request-id" in exposed and "x-ratelimit-remaining-tokens" in exposed
        # a page may know that it lacks a key
        refused = await http.post(CHAT, json={}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and allowed(refused)
        for other in ("https://b.example", "https://a.example.evil", "null", "http://a.example"):
            preflight = await http.options(CHAT, headers=PREFLIGHT | {"Origin": other})
            assert preflight.status_code == 400 and "allow-origin" not in allowed(preflight)
            answer = await http.get("/v1/models", headers=headers | {"Origin": other})
            assert "allow-origin" not in allowed(answer), other


async def test_every_origin(engine: LocalEngineClient) -> None:
    async with connect(create_app(engine, ServerConfig(cors_origins=("*",)))) as http:
        answer = await http.get("/v1/models", headers={"Origin": "https://x.example"})
        assert allowed(answer)["allow-origin"] == "*"
        assert "allow-credentials" not in allowed(answer)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("api.example.org", 200),
        ("API.example.org:8000", 200),
        ("a.b.inner.example", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("inner.example", 421),
        ("evil.example", 421),
        ("api.example.org.evil.example", 421),
        ("xinner.example", 421),
        ("", 421),
        ("[::2]:8000", 421),
    ],
)
async def test_names_that_are_answered(engine: LocalEngineClient, host: str, status: int) -> None:
    config = ServerConfig(allowed_hosts=("api.example.org", "*.inner.example", "[::1]"))
    async with connect(create_app(engine, config)) as http:
        answer = await http.get("/v1/models", headers={"Host": host})
        assert answer.status_code == status
        # probes ask by address
        assert (await http.get("/health", headers={"Host": host})).status_code == 200


async def test_by_default_every_name_is_answered(http: Any) -> None:
    assert (await http.get("/v1/models", headers={"Host": "any.example"})).status_code == 200
