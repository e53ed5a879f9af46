"""An app over a tiny model that is pooled, on a thread of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core, build_tokenizer
from paceline.engine.local import LocalEngineClient
from paceline.server import ServerConfig, create_app
from tests.server.helpers import connect

__all__ = ["client_of", "serving"]


def client_of(folder: Path, **settings: Any) -> LocalEngineClient:
    asked: dict[str, Any] = {"compute": "torch", "dtype": "float32", "threads": 1}
    engine = EngineSettings.of(model_name="tiny", model_path=str(folder), **{**asked, **settings})
    core, info = build_core(engine)
    return LocalEngineClient(core, info, build_tokenizer(engine))


@asynccontextmanager
async def serving(
    folder: Path, config: ServerConfig | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    client = client_of(folder, **settings)
    try:
        async with connect(create_app(client, config or ServerConfig())) as http:
            yield http
    finally:
        await client.close()
