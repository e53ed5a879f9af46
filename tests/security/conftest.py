"""Apps over the null backend, with and without keys, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from paceline.web.routes import ui_router
from tests.server.helpers import VOCAB, connect

from .keys import KEYS


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    yield client
    await client.close()


@pytest.fixture(scope="module")
def guarded(engine: LocalEngineClient) -> FastAPI:
    """An app that asks for keys."""
    return create_app(engine, ServerConfig(api_keys=KEYS), page=ui_router)


@pytest.fixture(scope="module")
async def open_http(engine: LocalEngineClient) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app without keys."""
    async with connect(create_app(engine, ServerConfig(), page=ui_router)) as http:
        yield http
