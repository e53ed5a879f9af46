"""Batches of several keys: turns, and whose limits hold for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.server import ServerConfig
from paceline.server.batches.store import BatchStore
from tests.server.batches.serving import ALICE, BOB, KEYS, URL, Server, line, running
from tests.server.batches.test_store import create, put
from tests.server.helpers import connect

# windows of a day: no test runs across the end of one
DAY = 86400


@asynccontextmanager
async def caller(server: Server, key: str) -> AsyncGenerator[Server, None]:
    """The server as the holder of a key sees it."""
    async with connect(server.app) as http:
        http.headers["Authorization"] = f"Bearer {key}"
        yield Server(http, server.app)


MARK: ContextVar[str] = ContextVar("mark", default="nobody")


async def test_lines_run_for_nobodys_exchange(tmp_path: Path) -> None:
    """Whoever opens the folder and starts the work on it."""
    async with running(tmp_path) as server:
        seen: list[str] = []
        client: Any = server.service.client
        original = client.generate
        client.generate = lambda *asked: (seen.append(MARK.get()), original(*asked))[1]
        MARK.set("the first caller")
        await server.http.post(URL, json={"prompt": "x", "max_tokens": 1})
        await server.until(await server.submit([line("a")]))
        assert seen == ["the first caller", "nobody"]


class Held:
    """An engine client whose answers to one tenant wait for ``go``."""

    def __init__(self, client: Any, tenant: str) -> None:
        self.go = asyncio.Event()
        self._tenant = tenant
        self._original = client.generate
        client.generate = self.generate

    async def generate(self, request: Any, sink: Any = None) -> Any:
        if request.tenant == self._tenant:
            await self.go.wait()
        async for output in self._original(request, sink):
            yield output


def test_owners_take_turns(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000)
    ids: dict[str, list[str]] = {}
    for owner, count in (("alice", 4), ("bob", 1), ("carol", 2)):
        file_id = put(store, owner=owner)
        ids[owner] = [create(store, file_id, owner).id for _ in range(count)]
    alice, bob, carol = ids.values()
    assert store.unfinished(99) == [alice[0], bob[0], carol[0], alice[1], carol[1], *alice[2:]]
    assert store.unfinished(4) == [alice[0], bob[0], carol[0], alice[1]]
    # what only has to end does not take long
    store.cancel(alice[3], "alice", 1.0)
    assert store.unfinished(2) == [alice[3], alice[0]]
    store.close()


async def test_one_keys_many_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.runner._MAX_ACTIVE", 3)
    config = ServerConfig(api_keys=KEYS)
    async with (
        running(tmp_path, server_config=config, concurrency=40) as server,
        caller(server, ALICE) as alice,
        caller(server, BOB) as bob,
    ):
        held = Held(server.service.client, "alice")
        many = [await alice.submit([line(f"{i}") for i in range(5)]) for _ in range(6)]
        for batch in many[:3]:
            await alice.until(batch, "in_progress")
        mine = await bob.until(await bob.submit([line("a")]))
        assert mine["status"] == "completed"
        held.go.set()
        for batch in many:
            found = await alice.until(batch)
            # those that made way as well
            assert found["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
            assert len(await alice.records(found["output_file_id"])) == 5


async def used(server: Server, who: str, rate: Rate) -> int:
    limiter = server.service.limiter
    assert limiter is not None
    return rate.amount - (await limiter._store.look("tokens", who, rate)).remaining


async def test_lines_are_charged_to_their_owner(tmp_path: Path) -> None:
    """Not to whoever used the folder first; apart from what the owner asks; and neither the number
    of requests nor that of those at once counts."""
    rate = Rate(1000, DAY)
    limits = KeyLimits(requests=Rate(6, DAY), tokens=rate, concurrent=1)
    config = ServerConfig(api_keys=KEYS, limits=limits)
    async with (
        running(tmp_path, server_config=config, concurrency=4) as server,
        caller(server, ALICE) as alice,
        caller(server, BOB) as bob,
    ):
        await alice.upload(b"x")
        lines = [line(f"{i}", [65] * 10, ignore_eos=True) for i in range(12)]
        batch = await bob.until(await bob.submit(lines))
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert await used(server, "batches of bob", rate) == 12 * (10 + 2)
        for who in ("alice", "bob", "batches of alice"):
            assert await used(server, who, rate) == 0


@pytest.mark.parametrize("opened", ["at start", "by a request"])
async def test_a_batch_waits_for_its_owners_tokens(tmp_path: Path, opened: str) -> None:
    """And keeps nobody else's waiting."""
    limits = KeyLimits(tokens=Rate(30, DAY))
    digest = ApiKey.of("alice", "user", ALICE).digest
    keys = (ApiKey("alice", "user", digest, {"tokens": None}), KEYS[1])
    config = ServerConfig(api_keys=keys, limits=limits)
    async with (
        running(tmp_path, server_config=config, concurrency=1) as server,
        caller(server, ALICE) as alice,
        caller(server, BOB) as bob,
    ):
        if opened == "at start":
            tmp_path.mkdir(exist_ok=True)
            await server.batches.start()
        # the first is more than the limit allows at any time
        lines = [line("large", [65] * 30)]
        lines += [line(f"{i}", [65] * 10, ignore_eos=True) for i in range(5)]
        slow = await bob.submit(lines)
        async with asyncio.timeout(10):
            while sum((await bob.get(slow))["request_counts"].values()) < 6 + 3:
                await asyncio.sleep(0.005)
        quick = await alice.until(await alice.submit([line(f"{i}") for i in range(20)]))
        assert quick["request_counts"]["completed"] == 20
        found = await bob.get(slow)
        assert found["status"] == "in_progress"
        assert found["request_counts"] == {"total": 6, "completed": 2, "failed": 1}
        # bob himself has what he had
        own = await bob.http.post(URL, json={"prompt": [65] * 10, "max_tokens": 2})
        assert own.status_code == 200
        await bob.http.post(f"/v1/batches/{slow['id']}/cancel")
        found = await bob.until(slow)
        assert found["status"] == "cancelled"
        errors = await bob.records(found["error_file_id"])
        assert len(errors) == 4 and "key may take 30" in str(errors["large"]["response"])
