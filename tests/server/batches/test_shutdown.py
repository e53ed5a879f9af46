"""A server ends while the disk of its batches is at something long."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.server.batches.store import BatchStore
from paceline.server.lifecycle import _Life, bind
from tests.server.batches.serving import Server, running

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


@asynccontextmanager
async def living(folder: Path) -> AsyncGenerator[tuple[Server, _Life], None]:
    listener = bind("127.0.0.1", 0)
    with listener:
        async with running(folder) as server:
            await server.batches.runner()
            yield server, _Life(server.service, server.app, server.batches, listener)


async def waits(stopping: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait((stopping,), timeout=0.1)
    assert not done


async def test_the_second_signal_does_not_wait_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.lifecycle._DISK_SECONDS", 0.01)
    async with living(tmp_path) as (server, life):
        answers = threading.Event()
        stuck = asyncio.create_task(server.batches.call(lambda store: answers.wait(30)))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(life._stop_batches())
        await waits(stopping)
        life._signalled(signal.SIGTERM)
        await waits(stopping)
        life._signalled(signal.SIGTERM)
        async with asyncio.timeout(10):
            await stopping
            # nor at the very end
            await life._stop_batches()
        assert not stuck.done()
        # the disk gets on after all, and the folder is given back
        answers.set()
        await stuck
        await server.batches.stop()
        BatchStore(tmp_path, 1000).close()


async def test_the_second_signal_ends_a_long_query(tmp_path: Path) -> None:
    async with living(tmp_path) as (server, life):

        def query(store: BatchStore) -> Any:
            with pytest.raises(Exception, match="interrupted"):
                store._db.execute(ENDLESS).fetchone()
            return "ended"

        endless = asyncio.create_task(server.batches.call(query))
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(life._stop_batches())
        await waits(stopping)
        for _ in range(2):
            life._signalled(signal.SIGTERM)
        async with asyncio.timeout(10):
            await stopping
            assert await endless == "ended"
        BatchStore(tmp_path, 1000).close()
