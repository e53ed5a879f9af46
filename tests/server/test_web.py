"""What browsers are told: nothing, unless a flag says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.engine.local import LocalEngineClient
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.settings.config import BatchConfig
from tests.server.helpers import chat_body, connect

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


JSON = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    "told",
    [
        {"Origin": "https://a.example"},
        {"Origin": "null"},
        {"Origin": "http://test:81"},
        {"Origin": "http://[test"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://test"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://a.example"},
    ],
)
async def test_what_a_page_of_another_origin_sends_is_refused(
    engine: LocalEngineClient, tmp_path: Path, told: dict[str, str]
) -> None:
    """Also what a browser sends without asking first: no content type at all, or a form."""
    config = ServerConfig(cors_origins=("https://b.example",), batches=BatchConfig(folder=tmp_path))
    async with connect(create_app(engine, config)) as http:
        form = {"Content-Type": "multipart/form-data; boundary=b"}
        for path, content, headers in (
            (CHAT, JSON, {}),
            (CHAT, JSON, {"Content-Type": "text/plain"}),
            ("/v1/files", FORM, form),
            ("/v1/messages", JSON, {}),
        ):
            answer = await http.post(path, content=content, headers=told | headers)
            assert answer.status_code == 403, path
            assert "--cors-origin" in answer.json()["error"]["message"]
            assert answer.headers["x-request-id"]
        assert (await http.delete("/v1/files/file-1", headers=told)).status_code == 403
        assert (await http.post("/ping", headers=told)).status_code == 200
        # reading changes nothing, and the page does not get to see it
        assert (await http.get("/v1/models", headers=told)).status_code == 200
        assert (await http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"Origin": "http://test"},
        {"Origin": "HTTPS://TEST"},
        {"Origin": "https://b.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://b.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "chrome-extension://abcdef"},
        # a proxy in between that gives the server another name
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://outside.example"},
        {"Sec-Fetch-Site": "none"},
    ],
)
async def test_who_may_send(engine: LocalEngineClient, told: dict[str, str]) -> None:
    config = ServerConfig(cors_origins=("https://b.example", "chrome-extension://abcdef"))
    async with connect(create_app(engine, config)) as http:
        answer = await http.post(CHAT, content=JSON, headers=told)
        assert answer.status_code == 200, answer.text


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
        origin = {"Origin": "https://x.example"}
        answer = await http.get("/v1/models", headers=origin)
        assert allowed(answer)["allow-origin"] == "*"
        assert (await http.post(CHAT, content=JSON, headers=origin)).status_code == 200
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


async def test_origins_may_have_a_star_within(engine: LocalEngineClient) -> None:
    origins = ("http://10.0.0.1:*", "app://*", "http://[::1]:*")
    async with connect(create_app(engine, ServerConfig(cors_origins=origins))) as http:

        async def status(origin: str) -> tuple[int, str | None]:
            told = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
            answer = await http.post(
                "/v1/chat/completions", json=chat_body(max_tokens=1), headers=told
            )
            return answer.status_code, answer.headers.get("access-control-allow-origin")

        for origin in ("http://10.0.0.1:81", "app://obsidian", "http://[::1]:5"):
            assert await status(origin) == (200, origin)
        for origin in ("http://10.0.0.12:81", "https://a.example", "http://:1]:5"):
            assert await status(origin) == (403, None)
