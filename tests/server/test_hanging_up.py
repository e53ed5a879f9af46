"""Whoever hangs up: nothing of its exchange is left once that is over, not even for a moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.protocol import Sink
from paceline.engine.testing import null_client
from paceline.engine.types import GenerationOutput, GenerationRequest
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, post_scope

_TEXT = {"max_tokens": 400, "stream": True, "ignore_eos": True}
_ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", chat_body(**_TEXT)),
    ("/v1/completions", _TEXT | {"prompt": "xy"}),
    ("/v1/completions", _TEXT | {"prompt": ["xy", "z"]}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 400, "stream": True}),
    ("/v1/messages", chat_body(max_tokens=400, stream=True)),
    (
        "/inference/v1/generate",
        {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 400}},
    ),
)


class Watched:
    """A client that knows how many of its answers are under way."""

    def __init__(self, engine: LocalEngineClient) -> None:
        self._engine = engine
        self.under_way = 0
        self.asked = 0
        self.on_dead = None
        self.on_stats = None
        self.on_timeline = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        self.asked += 1
        self.under_way += 1
        try:
            async with aclosing(self._engine.generate(request, sink)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.under_way -= 1


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=1024, step_time=0.01))
    yield client
    await client.close()


@pytest.mark.parametrize(("path", "body"), _ASKS)
async def test_nothing_is_left_when_the_exchange_is_over(
    engine: LocalEngineClient, path: str, body: dict[str, Any]
) -> None:
    client: Any = Watched(engine)
    app = create_app(client, ServerConfig())
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            # it does not even take the first event
            gone.set()
            await asyncio.Event().wait()

    scope = post_scope(path)
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    assert client.asked >= 1 and client.under_way == 0
    assert app.state.service.in_flight == 0 and engine.num_unfinished == 0
