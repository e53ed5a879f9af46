"""One app per test module over a null engine on a thread, reached without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, connect


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512), model="null-model")
    yield client
    await client.close()


@pytest.fixture(scope="module")
def app(engine: LocalEngineClient) -> FastAPI:
    return create_app(engine, ServerConfig(served_model_names=("tiny", "alias")))


@pytest.fixture(scope="module")
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as client:
        yield client


@pytest.fixture(scope="module")
async def poisoned(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """An app whose engine fails requests that hold token 7."""
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, poison_token=7, step_time=0.005)
    client = null_client(backend, pipeline_depth=1)
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()
