"""Streams on their way: those that wait say so, and no proxy keeps one back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect, events, say

COMMENT = ": keep-alive\n\n"


@pytest.fixture
async def slow(anyio_backend: str) -> AsyncIterator[FastAPI]:
    """One request at a time, 20 ms a token."""
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.02)
    client = null_client(backend, max_num_seqs=1, pipeline_depth=1)
    yield create_app(client, ServerConfig(sse_keep_alive=0.1))
    await client.close()


async def test_a_queued_stream_gets_comments(slow: FastAPI) -> None:
    async with connect(slow) as http:
        first = asyncio.ensure_future(
            http.post("/v1/chat/completions", json=chat_body(max_tokens=30, logit_bias=say("a")))
        )
        async with asyncio.timeout(5):
            while not slow.state.service.in_flight:
                await asyncio.sleep(0.005)
        body = chat_body(max_tokens=3, stream=True, logit_bias=say("b"))
        second = await http.post("/v1/chat/completions", json=body)
        await first
    assert second.text.startswith(COMMENT) and second.text.count(COMMENT) >= 2
    chunks = events(second.text.replace(COMMENT, ""))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "bbb"


async def test_a_stream_that_flows_gets_none(slow: FastAPI) -> None:
    async with connect(slow) as http:
        body = chat_body(max_tokens=20, stream=True, logit_bias=say("b"))
        answer = await http.post("/v1/chat/completions", json=body)
    assert COMMENT not in answer.text


async def test_an_error_after_the_first_comment_is_an_event(anyio_backend: str) -> None:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.2, poison_token=7)
    client = null_client(backend, pipeline_depth=1)
    app = create_app(client, ServerConfig(sse_keep_alive=0.05))
    async with connect(app) as http:
        body = {"prompt": [1, 7], "max_tokens": 3, "stream": True}
        answer = await http.post("/v1/completions", json=body)
    await client.close()
    assert answer.status_code == 200 and answer.text.startswith(COMMENT)
    (error,) = events(answer.text.replace(COMMENT, ""))
    assert "poison" in error["error"]["message"]


async def test_hanging_up_while_queued_leaves_nothing(slow: FastAPI) -> None:
    async with connect(slow) as http:
        body = chat_body(max_tokens=100, stream=True, logit_bias=say("a"))
        waiting = [
            asyncio.ensure_future(http.post("/v1/chat/completions", json=body)) for _ in range(3)
        ]
        service = slow.state.service
        async with asyncio.timeout(5):
            while service.client.num_unfinished < 3:
                await asyncio.sleep(0.005)
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        async with asyncio.timeout(5):
            while service.in_flight or service.client.num_unfinished:
                await asyncio.sleep(0.01)


CHAT = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "stream": True, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "stream": True, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "stream": True, "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "stream": True, "max_tokens": 3},
    "/api/chat": {"model": "tiny", "messages": CHAT, "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": "hi", "options": {"num_predict": 3}},
    "/completion": {"prompt": "hi", "stream": True, "n_predict": 3},
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "stream": True,
        "sampling_params": {"max_tokens": 3},
    },
}


@pytest.mark.parametrize("path", STREAMS)
async def test_no_proxy_keeps_a_stream_back(http: httpx.AsyncClient, path: str) -> None:
    """nginx collects an answer until a buffer is full, unless the answer asks it not to."""
    streamed = await http.post(path, json=STREAMS[path])
    assert streamed.status_code == 200 and "content-length" not in streamed.headers
    assert streamed.headers["x-accel-buffering"] == "no"
    whole = await http.post(path, json=STREAMS[path] | {"stream": False})
    assert whole.status_code == 200 and "x-accel-buffering" not in whole.headers
