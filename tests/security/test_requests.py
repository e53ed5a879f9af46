"""Hostile values in requests: integers, addresses to fetch, errors that tell, labels that grow."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.engine.local import LocalEngineClient
from paceline.server import ServerConfig, create_app
from paceline.server.app import batches_of
from paceline.server.settings.config import BatchConfig
from tests.server.helpers import connect, scrape

from .keys import ADMIN, KEYS, bearer
from .test_auth_matrix import every_route

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
}
INTEGERS = (
    "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_k", "seed",
    "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "priority", "logprobs",
)  # fmt: skip
# what chat and completions take for a field of somebody else's, and ignore
IGNORED = {
    "/v1/chat/completions": ("max_output_tokens",),
    "/v1/completions": ("max_output_tokens", "max_completion_tokens", "top_logprobs"),
    "/inference/v1/generate": ("max_output_tokens", "max_completion_tokens", "top_logprobs"),
}
# as JSON, which has numbers that Python has not
EXTREMES = (
    "-2147483649", "9223372036854775808", "18446744073709551616", "1" + "0" * 400,
    "-" + "9" * 400, "1.5", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", '"7"', "[]", "{}",
    "[1]",
)  # fmt: skip


async def raw(http: httpx.AsyncClient, path: str, body: str) -> httpx.Response:
    return await http.post(path, content=body.encode(), headers=JSON)


def with_field(path: str, name: str, value: str) -> str:
    """The body of ``path`` as JSON, with a field of raw JSON where its API has such fields."""
    body = json.loads(json.dumps(BODIES[path]))
    target = body.setdefault("sampling_params", {}) if "generate" in path else body
    target[name] = "VALUE"
    return json.dumps(body).replace('"VALUE"', value)


@pytest.mark.parametrize("path", BODIES)
async def test_extreme_numbers(open_http: httpx.AsyncClient, path: str) -> None:
    for name in INTEGERS:
        if name in IGNORED.get(path, ()):
            continue
        for value in EXTREMES:
            answer = await raw(open_http, path, with_field(path, name, value))
            if name in ("seed", "priority") and value == EXTREMES[0]:
                # they have 64 bits
                assert answer.status_code in (200, 400)
                continue
            # some APIs know few of these, and refuse the others by name
            assert answer.status_code == 400, (path, name, value, answer.text)
            assert len(answer.content) < 1000
    alive = await open_http.post(path, json=BODIES[path])
    assert alive.status_code == 200, alive.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_extreme_sampling_values(open_http: httpx.AsyncClient, path: str) -> None:
    for name in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    ):  # fmt: skip
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e300", "1e300", '"0"', "[]"):
            answer = await raw(open_http, path, with_field(path, name, value))
            assert answer.status_code == 400, (name, value)
    for bias in ('{"1": NaN}', '{"1": 1e999}', '{"-1": 1}', '{"99999999999": 1}', "[[1, 2]]"):
        assert (await raw(open_http, path, with_field(path, "logit_bias", bias))).status_code == 400


@pytest.mark.parametrize("empty", ["", [], [[]], None, [""], [[], []], {}, 0])
async def test_empty_prompts(open_http: httpx.AsyncClient, empty: Any) -> None:
    """Some are prompts of one special token; none ends the server."""
    answer = await open_http.post("/v1/completions", json={"prompt": empty, "max_tokens": 1})
    assert answer.status_code in (200, 400)
    alive = await open_http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert alive.status_code == 200


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|im_start|>", "<|bos|>", "<|image_pad|>", "<image>", "<s>", "[INST]"]
)
async def test_control_tokens_in_a_text(open_http: httpx.AsyncClient, token: str) -> None:
    """Each is so many tokens, however many there are; too many are a prompt that is too long."""
    counts = []
    for number in (1, 2, 2001, 2002):
        message = [{"role": "user", "content": token * number}]
        body = {"messages": message}
        counts.append((await open_http.post("/tokenize", json=body)).json()["count"])
    assert counts[1] - counts[0] == counts[3] - counts[2] == (counts[2] - counts[0]) / 2000
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await open_http.post(path, json={"messages": message, "max_tokens": 1})
        assert answer.status_code == 400
        assert "maximum context length" in answer.text
    answer = await open_http.post(
        "/v1/completions", json={"prompt": token * 3, "max_tokens": 1, "echo": True}
    )
    assert answer.status_code == 200


@contextmanager
def listener() -> Iterator[tuple[int, list[bytes]]]:
    """A port, and what came in on it."""
    hits: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    hits.append(connection.recv(1000))

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], hits
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


async def test_nothing_is_fetched_for_a_caller(open_http: httpx.AsyncClient) -> None:
    with listener() as (port, hits):
        urls = (
            f"http://127.0.0.1:{port}/a",
            f"http://localhost:{port}\\@example.org/a",
            f"//127.0.0.1:{port}/a",
            f"http://[::ffff:127.0.0.1]:{port}/a",
            "file:///etc/passwd",
            "gopher://127.0.0.1/",
        )
        for url in urls:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "image_url", "image_url": url},
                {"type": "input_image", "image_url": url},
                {"type": "image", "source": {"type": "url", "url": url}},
                {"type": "document", "source": {"type": "url", "url": url}},
                {"type": "audio_url", "audio_url": {"url": url}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "input_file", "file_url": url},
                {"type": "file", "file": {"file_id": url}},
            ]
            for part in parts:
                content = [{"type": "text", "text": "see"}, part]
                message = [{"role": "user", "content": content}]
                for path, body in (
                    ("/v1/chat/completions", {"messages": message}),
                    ("/v1/messages", {"messages": message, "max_tokens": 1}),
                    ("/v1/responses", {"input": message}),
                    ("/tokenize", {"messages": message}),
                ):
                    answer = await open_http.post(path, json=body)
                    assert answer.status_code == 400, (path, part, answer.text)
                    assert "root:" not in answer.text
            schema = {"$ref": url}
            for fields in (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
                {"structured_outputs": {"json": schema}},
                {"tools": [{"type": "mcp", "server_url": url, "server_label": "x"}]},
            ):
                body = BODIES["/v1/chat/completions"] | fields
                answer = await open_http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400, (fields, answer.text)
            # a name of a model is not a place, and a server that was asked for is not gone to
            for fields in ({"model": url}, {"api_base": url, "base_url": url, "webhook": url}):
                body = BODIES["/v1/chat/completions"] | fields
                answer = await open_http.post("/v1/chat/completions", json=body)
                assert answer.status_code == (404 if "model" in fields else 200)
        assert not hits


PRIVATE = re.compile(
    r"0x[0-9a-fA-F]{4,}|Traceback|\bFile \"|\bline \d+, in\b|site-packages|\.py\b"
    r"|(?<![\w:/.<])/(?:home|usr|opt|root|var|tmp|etc|work|lib|srv|mnt|proc)/"
)


async def test_errors_tell_nothing_of_the_machine(
    engine: LocalEngineClient, tmp_path: Path
) -> None:
    app: FastAPI = create_app(
        engine,
        ServerConfig(
            api_keys=KEYS,
            trust_request_chat_template=True,
            batches=BatchConfig(folder=tmp_path / "batches"),
        ),
    )
    wrong: list[Any] = [
        {}, [], "x", 5, {"model": "nobody"}, {"messages": 5, "prompt": 5, "input": 5},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"prompt": ["a", 1]}, {"token_ids": ["x"]}, {"tokens": [10**30]},
        {"messages": MESSAGES, "chat_template": "{{ raise_exception(range) }}"},
        {"messages": MESSAGES, "chat_template": "{{ messages | map('upper') | first + 1 }}"},
        {"messages": MESSAGES, "chat_template": "{% include '/etc/passwd' %}"},
        {"messages": MESSAGES, "chat_template": "{% import 'os' as o %}{{ o }}"},
        {"messages": MESSAGES, "chat_template": "{{ 1 / 0 }}"},
        {"messages": MESSAGES, "structured_outputs": {"regex": "(((("}},
        {"messages": MESSAGES, "structured_outputs": {"grammar": "start: x"}},
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": 5}},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f",
         "parameters": {"type": "x"}}}], "tool_choice": "required"},
    ]  # fmt: skip
    seen = 0
    async with connect(app) as http:
        for method, path in every_route(app):
            for body in wrong:
                answer = await http.request(method, path, json=body, headers=bearer(ADMIN))
                if answer.status_code < 400 or method == "HEAD":
                    continue
                seen += 1
                assert not PRIVATE.search(answer.text), (method, path, body, answer.text)
                assert answer.status_code < 500, (method, path, body, answer.text)
    await batches_of(app).stop()
    assert seen > 200


@pytest.fixture(scope="module")
async def admin_http(guarded: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(guarded) as http:
        http.headers.update(bearer(ADMIN))
        yield http


async def test_callers_cannot_make_time_series(admin_http: httpx.AsyncClient) -> None:
    """Models, tenants, classes, ids, salts, methods and paths of their own making."""

    async def ask(name: str) -> None:
        named = {"model": name, "user": name, "cache_salt": name, "slo": name}
        headers = {
            "x-llm-d-inference-fairness-id": name,
            "x-gateway-inference-fairness-id": name,
            "x-request-id": name,
            "traceparent": name,
        }
        for path, body in BODIES.items():
            for fields in ({"model": name}, {"slo": name}, {"cache_salt": name}, named, {}):
                given = {"Host": f"{name}.example", "User-Agent": name} | headers
                await admin_http.post(path, json=body | fields, headers=given)
        await admin_http.get(f"/{name}", headers=headers)
        await admin_http.get(f"/v1/models/{name}", headers=headers)
        await admin_http.get(f"/v1/responses/{name}", headers=headers)
        await admin_http.request(name.upper(), "/v1/models", headers=headers)

    def series(text: str) -> list[str]:
        return sorted(
            line.rsplit(" ", 1)[0] for line in text.splitlines() if line[:1] not in ("", "#")
        )

    for warm in range(3):
        await ask(f"odd{warm}")
    before = series(await scrape(admin_http))
    for number in range(3, 20):
        await ask(f"odd{number}")
    text = await scrape(admin_http)
    grown = sorted(set(series(text)) - set(before))
    assert len(grown) <= 8, grown
    assert "odd" not in text.lower()
