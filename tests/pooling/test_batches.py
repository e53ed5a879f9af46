"""Lines of batches that ask for vectors: answered as over HTTP, in the batch class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.core.tier import Tier
from paceline.server import ServerConfig
from tests.pooling.models import add_modules, make_bert
from tests.pooling.serving import client_of
from tests.server.batches.serving import running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["the quick fox", "the lazy dog"]},
    "/v1/rerank": {"query": "the fox", "documents": ["the dog", "a fox"]},
    "/v1/score": {"text_1": "the fox", "text_2": ["the dog", "a fox"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_bert(tmp_path_factory.mktemp("bert"))
    add_modules(made, "mean_tokens")
    return made


async def test_lines_are_answered_as_over_http_and_behind_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: list[Tier] = []
    original = Scheduler.add_request

    def spy(self: Scheduler, request: Request) -> None:
        tiers.append(request.tier)
        original(self, request)

    monkeypatch.setattr(Scheduler, "add_request", spy)
    client = client_of(folder)
    config = ServerConfig(price_per_hour=0.0)
    async with running(tmp_path, client=client, server_config=config) as server:
        for url, body in BODIES.items():
            tiers.clear()
            line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            bad = {"custom_id": "b", "method": "POST", "url": url, "body": {}}
            batch = await server.until(await server.submit([line, bad], endpoint=url))
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
            assert len(tiers) >= 2 and set(tiers) == {Tier.BACKGROUND}
            answer = (await server.records(batch["output_file_id"]))["a"]["response"]["body"]
            tiers.clear()
            over_http = (await server.http.post(url, json=body)).json()
            assert set(tiers) == {Tier.ORDINARY}
            for name in ("data", "results", "usage"):
                assert answer.get(name) == over_http.get(name)
            await matches_the_document(server.http, server.app, url, over_http)


async def matches_the_document(http: httpx.AsyncClient, app: Any, url: str, answer: Any) -> None:
    document = app.openapi()
    content = document["paths"][url]["post"]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": document["components"]})
    body = document["paths"][url]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(BODIES[url], {**body, "components": document["components"]})
