"""Batches over an engine process that ends and is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.server import ServerConfig
from tests.engine.supervision.test_supervisor import DIE, supervised
from tests.server.batches.serving import Server, line, running


@asynccontextmanager
async def serving(folder: Path, **backend: Any) -> AsyncGenerator[tuple[Server, Any], None]:
    async with (
        supervised(**backend) as client,
        running(folder, client=client, server_config=ServerConfig(), concurrency=4) as server,
    ):
        yield server, client


def lines(number: int) -> list[dict[str, Any]]:
    return [line(f"{i}", [i + 1, 5], max_tokens=8, ignore_eos=True) for i in range(number)]


async def answers(server: Server, batch: dict[str, Any]) -> dict[str, str]:
    records = await server.records(batch["output_file_id"])
    return {
        name: record["response"]["body"]["choices"][0]["text"] for name, record in records.items()
    }


@pytest.mark.parametrize("hold", [pytest.param(60.0, marks=pytest.mark.thorough), 0.05])
async def test_an_engine_killed_under_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: float
) -> None:
    """Within the time that its client holds requests, and after it: the batch goes on."""
    monkeypatch.setattr("paceline.engine.supervision.supervisor._HOLD_SECONDS", hold)
    async with serving(tmp_path) as (server, client):
        expected = await answers(server, await server.until(await server.submit(lines(40))))
        assert len(expected) == 40
        batch = await server.submit(lines(40))
        paused = False
        async with asyncio.timeout(20):
            while (await server.get(batch))["request_counts"]["completed"] < 4:
                await asyncio.sleep(0.002)
        assert client.faults.up
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while client.faults.up:
                await asyncio.sleep(0.002)
            while not client.faults.up:
                errors = (await server.get(batch))["errors"]
                paused |= "another engine is being started" in str(errors)
                await asyncio.sleep(0.02)
        async with asyncio.timeout(20):
            while (found := await server.get(batch))["status"] != "completed":
                await asyncio.sleep(0.02)
        # one that comes while there is no engine waits like the others
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while client.faults.up:
                await asyncio.sleep(0.002)
            late = await server.submit(lines(4))
            while (now := await server.get(late))["status"] != "completed":
                paused |= "another engine is being started" in str(now["errors"])
                await asyncio.sleep(0.02)
        assert len(await answers(server, now)) == 4
        assert paused is (hold < 1)
        assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert await answers(server, found) == expected


async def test_a_line_that_kills_engines(tmp_path: Path) -> None:
    """The client finds it by itself; the batch must not begin anew under its hands."""
    async with serving(tmp_path, die_on=DIE) as (server, client):
        asked = lines(30)
        asked[11]["body"]["prompt"] = [DIE]
        batch = await server.submit(asked)
        async with asyncio.timeout(30):
            while (found := await server.get(batch))["status"] != "completed":
                await asyncio.sleep(0.02)
        assert found["request_counts"] == {"total": 30, "completed": 29, "failed": 1}
        errors = await server.records(found["error_file_id"])
        assert errors["11"]["response"]["status_code"] == 500
        assert client.faults.losses == (("exit", 2),)
