"""What one tenant can learn of another: nothing, from the prefix cache or from ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, connect

from .keys import ADMIN, KEYS, OTHER, USER, bearer

SECRET = "the password is swordfish, " * 8


@asynccontextmanager
async def fresh(**config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An app whose cache holds nothing yet."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    app: FastAPI = create_app(client, ServerConfig(**config))
    async with connect(app) as http:
        yield http
    await client.close()


async def cached(http: httpx.AsyncClient, headers: dict[str, str], **fields: Any) -> int:
    body = {"prompt": SECRET, "max_tokens": 1, **fields}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_one_key_does_not_see_what_another_asked() -> None:
    async with fresh(api_keys=KEYS) as http:
        assert await cached(http, bearer(USER)) == 0
        assert await cached(http, bearer(USER)) > 100
        assert await cached(http, bearer(OTHER)) == 0
        assert await cached(http, bearer(OTHER)) > 100


async def test_a_salt_does_not_reach_into_another_key() -> None:
    async with fresh(api_keys=KEYS) as http:
        await cached(http, bearer(USER), cache_salt="s")
        assert await cached(http, bearer(USER), cache_salt="s") > 100
        assert await cached(http, bearer(USER)) == await cached(http, bearer(USER), cache_salt="t")
        for salt in ("s", "alice", "5:alice", "5:alice:", "5:alice:s", "alice:s", "3:bob:s"):
            assert await cached(http, bearer(OTHER), cache_salt=salt) == 0, salt


async def test_a_gateways_tenants_are_apart_too() -> None:
    async with fresh(api_keys=KEYS) as http:

        def tenant(name: str, key: str = ADMIN) -> dict[str, str]:
            return bearer(key) | {"x-llm-d-inference-fairness-id": name}

        await cached(http, tenant("carol"))
        assert await cached(http, tenant("carol")) > 100
        assert await cached(http, tenant("dave")) == 0
        # a user cannot say that it is somebody else
        assert await cached(http, tenant("carol", OTHER)) == 0
        assert await cached(http, bearer(OTHER)) > 100


async def guessed(http: httpx.AsyncClient, headers: dict[str, str], **fields: Any) -> int:
    """Right guesses from finished answers."""
    body = {"prompt": SECRET, "max_tokens": 40, "temperature": 0, "explain": True, **fields}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (timeline,) = answer.json()["usage"]["timeline"]
    told = timeline["speculation"].get("finished_answers", {"accepted_tokens": 0})
    count: int = told["accepted_tokens"]
    return count


@pytest.mark.parametrize("shares", [False, True])
async def test_nobody_is_guessed_from_what_another_was_answered(shares: bool) -> None:
    # steps as long as a small model's: guesses are worth their time
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.002)
    client = null_client(backend, speculative_config={"method": "auto"})
    config = ServerConfig(api_keys=KEYS, share_prefix_cache=shares)
    async with connect(create_app(client, config)) as http:
        assert await guessed(http, bearer(USER)) == 0
        assert await guessed(http, bearer(USER)) > 10
        assert await guessed(http, bearer(OTHER)) == 0
        assert await guessed(http, bearer(USER), cache_salt="s") == 0
    await client.close()


async def test_sharing_is_a_decision() -> None:
    async with fresh(api_keys=KEYS, share_prefix_cache=True) as http:
        await cached(http, bearer(USER))
        assert await cached(http, bearer(OTHER)) > 100
        assert await cached(http, bearer(OTHER), cache_salt="mine") == 0


async def test_without_keys_a_salt_is_what_keeps_apart() -> None:
    async with fresh() as http:
        await cached(http, {})
        assert await cached(http, {}) > 100
        assert await cached(http, {}, cache_salt="other") == 0


def told(usage: dict[str, Any]) -> int:
    """Cached tokens as each API tells them."""
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return int(usage[name]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


async def test_every_api_is_kept_apart() -> None:
    async with fresh(api_keys=KEYS) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 1}),
            ("/v1/responses", {"input": "TEXT"}),
            ("/v1/completions", {"prompt": "TEXT"}),
        ):
            raw = json.dumps(body | {"max_output_tokens": 1} if "input" in body else body)
            raw = raw.replace("TEXT", f"{path} {SECRET}")
            counts = []
            for key in (USER, USER, OTHER):
                headers = bearer(key) | {"Content-Type": "application/json"}
                answer = await http.post(path, content=raw, headers=headers)
                counts.append(told(answer.json()["usage"]))
            assert counts[0] == 0 and counts[1] > 100 and counts[2] == 0, (path, counts)
