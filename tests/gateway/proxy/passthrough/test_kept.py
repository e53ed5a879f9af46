"""Responses, files and batches behind a gateway: each is asked of the engine that has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from paceline.gateway import EngineConfig, GatewayConfig
from paceline.gateway.lifecycle import GatewayServer
from paceline.gateway.proxy.passthrough.kept import Homes
from paceline.gateway.settings.config import KeyConfig
from paceline.http.keys import ApiKey
from paceline.http.listening import bind
from tests.gateway.helpers import gateway_over
from tests.server.batches.serving import running

RESPONSES = "/v1/responses"
ASKED = {"model": "null", "input": "hi", "max_output_tokens": 3}
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "null",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "x"}],
    },
}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """One of Paceline's own servers, in this process: its address."""
    async with running(folder, step_time=0.001) as made:
        config = uvicorn.Config(made.app, lifespan="off", ws="none", log_config=None)
        server, listener = GatewayServer(config), bind("127.0.0.1", 0)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            await serving


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[GatewayConfig]:
    """A configuration over three."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(served(tmp_path / f"e{i}")) for i in range(3)]
        yield GatewayConfig(
            engines=tuple(
                EngineConfig(name=f"e{i}", url=url, kind="paceline") for i, url in enumerate(found)
            ),
            poll_timeout=2.0,
        )


async def made(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(RESPONSES, json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        told: dict[str, Any] = answer.json()
        return told | {"engine": answer.headers["x-paceline-engine"]}
    last = json.loads(answer.text.rstrip().split("\n\n")[-1].partition("data: ")[2])
    return {**last["response"], "engine": answer.headers["x-paceline-engine"]}


async def test_a_response_goes_on_where_it_is(engines: GatewayConfig) -> None:
    """Also at a gateway that knows nothing of it; and no guess is counted as a failure."""
    async with gateway_over(engines) as (gateway, client):
        # at once, so that no one engine is the least busy for all of them
        first = await asyncio.gather(*(made(client, stream=bool(i % 2)) for i in range(8)))
        assert len({each["engine"] for each in first}) > 1
        asked: list[str] = []
        second = []
        for each in first:
            before = len(gateway.stored.homes)
            second.append(await made(client, previous_response_id=each["id"]))
            assert second[-1]["engine"] == each["engine"]
            # nothing but the new one is learned
            assert len(gateway.stored.homes) == before + 1
            asked.append(second[-1]["id"])
        assert "paceline:gateway_attempt_failures_total{" not in (await client.get("/metrics")).text
    async with gateway_over(engines) as (gateway, client):
        for each in second:
            third = await made(client, previous_response_id=each["id"], stream=True)
            assert third["engine"] == each["engine"]
            found = await client.get(f"{RESPONSES}/{each['id']}")
            assert found.json()["id"] == each["id"]
            assert found.headers["x-paceline-engine"] == each["engine"]
        assert "paceline:gateway_attempt_failures_total{" not in (await client.get("/metrics")).text


async def test_one_that_runs_in_the_background(engines: GatewayConfig) -> None:
    async with gateway_over(engines) as (_, client):
        running = await made(client, background=True, max_output_tokens=400)
        assert running["status"] in ("queued", "in_progress")
        path = f"{RESPONSES}/{running['id']}"
        assert (await client.get(path)).json()["id"] == running["id"]
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        items = (await client.get(f"{path}/input_items?limit=1")).json()
        assert items["data"][0]["role"] == "user"
        assert (await client.delete(path)).json()["deleted"] is True
        for gone in (path, f"{path}/input_items"):
            assert (await client.get(gone)).status_code == 404
        assert (await client.put(path)).status_code == 405


@pytest.mark.parametrize("known", [True, False])
async def test_an_id_that_no_engine_has(engines: GatewayConfig, known: bool) -> None:
    async with gateway_over(engines) as (gateway, client):
        if known:
            # it had it, and has it no longer
            gateway.stored.homes.note("resp_none", "e1", "")
        for answer in (
            await client.get(f"{RESPONSES}/resp_none"),
            await client.post(RESPONSES, json=ASKED | {"previous_response_id": "resp_none"}),
        ):
            assert answer.status_code == 404, answer.text
            assert "no response with id 'resp_none' is stored here" in answer.text
        assert (await client.get("/v1/files/file-none")).status_code == 404
        assert (await client.get("/v1/batches/batch_none")).status_code == 404


async def test_an_engine_that_may_have_it_and_does_not_answer(engines: GatewayConfig) -> None:
    """It may be there: that is no 404, which clients take for the end of it."""
    gone = EngineConfig(name="gone", url="http://127.0.0.1:9", kind="vllm")
    config = GatewayConfig(engines=(*engines.engines, gone), connect_timeout=0.5)
    async with gateway_over(config) as (_, client):
        answer = await client.get(f"{RESPONSES}/resp_none")
        assert answer.status_code == 503 and "gone" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        one = await made(client)
        assert (await client.get(f"{RESPONSES}/{one['id']}")).status_code == 200


async def test_a_batch_runs_where_its_file_is(engines: GatewayConfig) -> None:
    upload = {"file": ("a.jsonl", json.dumps(LINE).encode() + b"\n")}
    async with gateway_over(engines) as (_, client):
        files = []
        for _ in range(4):
            told = await client.post("/v1/files", data={"purpose": "batch"}, files=upload)
            assert told.status_code == 200, told.text
            files.append(told.json()["id"])
        wanted = {
            "input_file_id": files[-1],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = (await client.post("/v1/batches", json=wanted)).json()
    async with gateway_over(engines) as (_, client):
        async with asyncio.timeout(20):
            while batch["status"] != "completed":
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        content = await client.get(f"/v1/files/{batch['output_file_id']}/content")
        assert json.loads(content.text)["custom_id"] == "a"
        assert content.headers["content-disposition"].startswith("attachment")
        assert [each["id"] for each in (await client.get("/v1/batches")).json()["data"]] == [
            batch["id"]
        ]
        seen: list[str] = []
        more, after = True, ""
        while more:
            page = (await client.get(f"/v1/files?limit=2&purpose=batch{after}")).json()
            seen += [each["id"] for each in page["data"]]
            more, after = page["has_more"], f"&after={page['last_id']}"
        assert sorted(seen) == sorted(files)
        assert (await client.delete(f"/v1/files/{files[0]}")).json()["deleted"] is True
        assert (await client.get(f"/v1/files/{files[0]}")).status_code == 404
        assert (await client.get("/v1/files?limit=0")).status_code == 400
        wanted["input_file_id"] = "file-none"
        assert (await client.post("/v1/batches", json=wanted)).status_code == 404


ANN, BOB = (ApiKey.of(name, "user", f"secret-{name}") for name in ("ann", "bob"))


async def test_what_is_kept_is_its_keys_alone(engines: GatewayConfig) -> None:
    """Engines know the gateway's key only."""
    ann, bob = ({"authorization": f"Bearer secret-{name}"} for name in ("ann", "bob"))
    upload = {"file": ("a.jsonl", json.dumps(LINE).encode())}
    async with gateway_over(engines, (ANN, BOB)) as (_, client):
        told = (await client.post(RESPONSES, json=ASKED, headers=ann)).json()
        file = await client.post("/v1/files", data={"purpose": "batch"}, files=upload, headers=ann)
        follow = ASKED | {"previous_response_id": told["id"]}
        for headers, status in ((bob, 404), (ann, 200)):
            path = f"{RESPONSES}/{told['id']}"
            assert (await client.get(path, headers=headers)).status_code == status
            assert (
                await client.post(RESPONSES, json=follow, headers=headers)
            ).status_code == status
            path = f"/v1/files/{file.json()['id']}"
            assert (await client.get(path, headers=headers)).status_code == status
            listed = (await client.get("/v1/files", headers=headers)).json()["data"]
            assert len(listed) == (1 if status == 200 else 0)


async def test_no_batch_goes_round_a_limit(engines: GatewayConfig) -> None:
    """What it uses its engine alone knows."""
    wanted = {"input_file_id": "file-a", "endpoint": "/v1/chat/completions"}
    headers = {"authorization": "Bearer secret-ann"}
    for limits in (
        {"rate_limit_tokens": "1000/minute"},
        {"keys": (KeyConfig(name="ann", models=("null",)),), "spend_storage": ""},
    ):
        config = GatewayConfig(engines=engines.engines, **limits)
        async with gateway_over(config, (ANN,)) as (_, client):
            answer = await client.post("/v1/batches", json=wanted, headers=headers)
            assert answer.status_code == 403 and "limits" in answer.text


def test_what_is_remembered_is_bounded() -> None:
    homes = Homes(most=2)
    for name in ("a", "b"):
        homes.note(name, "e1", "ann")
    assert homes.find("a") is not None
    homes.note("c", "e2", None)
    # what was asked for last stays
    assert len(homes) == 2 and homes.find("b") is None and homes.find("a") is not None
    homes.forget("a")
    assert homes.find("a") is None
