"""What the tests of this folder share."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
from fastapi import FastAPI

from paceline.backends.reference.null import expected_tokens
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import ByteTokenizer

VOCAB = ByteTokenizer().vocab_size
# the null backend samples a token with this bias whatever came before
ALWAYS = 100


def connect(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def post_scope(path: str) -> dict[str, Any]:
    """What an ASGI server says of a POST of JSON; for tests that are the server."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
        "scheme": "http",
    }


def say(text: str) -> dict[str, int]:
    """A logit_bias that makes the null backend repeat one character."""
    (token,) = text.encode()
    return {str(token): ALWAYS}


def chat_body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def chat_prompt(text: str) -> list[int]:
    tokenizer = ByteTokenizer()
    rendered = tokenizer.render_chat([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def expected_text(prompt: list[int], count: int) -> tuple[list[int], str]:
    """What the null backend says after ``prompt``, to its end-of-sequence or ``count`` tokens."""
    tokens = expected_tokens(prompt, count, VOCAB)
    if ByteTokenizer.IM_END in tokens:
        tokens = tokens[: tokens.index(ByteTokenizer.IM_END) + 1]
    return tokens, ByteTokenizer().decode(tokens)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines), lines
    payloads = [line.removeprefix("data: ") for line in lines]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry ``labels``."""
    total = 0.0
    found = False
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if match is None or match[1] != name:
            continue
        have = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        if labels.items() <= have.items():
            total += float(match[3])
            found = True
    assert found, f"{name} with {labels} is not among the metrics"
    return total


async def scrape(http: httpx.AsyncClient) -> str:
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    return answer.text


async def rested(client: LocalEngineClient, http: httpx.AsyncClient) -> str:
    """Metrics once the engine has nothing to do: the last step's snapshot follows its tokens."""
    engine = client._core
    async with asyncio.timeout(5):
        while engine.has_work or client.stats.scheduler != engine.stats():
            await asyncio.sleep(0.005)
    return await scrape(http)
