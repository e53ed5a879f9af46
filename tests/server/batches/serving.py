"""An app with a batch folder, as tests talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from paceline.backends.reference.null import NullBackend
from paceline.engine.protocol import EngineClient
from paceline.engine.testing import null_client
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import batches_of, service_of
from paceline.server.settings.config import BatchConfig
from tests.server.helpers import VOCAB, connect

ENDED = ("completed", "failed", "expired", "cancelled")
ALICE, BOB = "alice-key-0123456789", "bobs-key-0123456789"
KEYS = (ApiKey.of("alice", "user", ALICE), ApiKey.of("bob", "user", BOB))
URL = "/v1/completions"
SMALL_BODIES = ServerConfig(max_body_bytes=5000)


class Server:
    """An app over its own engine, with a clock that tests set."""

    def __init__(self, http: httpx.AsyncClient, app: Any) -> None:
        self.http = http
        self.app = app
        self.service = service_of(app)
        self.batches = batches_of(app)

    async def upload(self, content: bytes, **headers: str) -> httpx.Response:
        return await self.http.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", content)},
            headers=headers,
        )

    async def submit(
        self, lines: Sequence[dict[str, Any] | bytes], endpoint: str = URL, **fields: Any
    ) -> dict[str, Any]:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file = (await self.upload(b"\n".join(raw))).json()
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "1h"}
        answer = await self.http.post("/v1/batches", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def get(self, batch: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"/v1/batches/{batch['id']}")).json()
        return found

    async def until(self, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while (found := await self.get(batch))["status"] not in (statuses or ENDED):
                await asyncio.sleep(0.005)
        return found

    async def records(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        if file_id is None:
            return {}
        text = (await self.http.get(f"/v1/files/{file_id}/content")).text
        found = [json.loads(line) for line in text.splitlines()]
        assert len({record["custom_id"] for record in found}) == len(found)
        return {record["custom_id"]: record for record in found}


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *,
    step_time: float = 0.0,
    client: EngineClient | None = None,
    server_config: ServerConfig = SMALL_BODIES,
    **config: Any,
) -> AsyncGenerator[Server, None]:
    if client is None:
        backend = NullBackend(
            vocab_size=VOCAB, max_model_len=512, step_time=step_time, poison_token=7
        )
        client = null_client(backend, max_num_seqs=8)
    batches = BatchConfig(folder=folder, **config)
    app = create_app(client, replace(server_config, batches=batches))
    async with connect(app) as http:
        server = Server(http, app)
        try:
            yield server
        finally:
            await server.batches.stop()
            await client.close()


def line(custom_id: str, prompt: Any = "hi", url: str = URL, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
