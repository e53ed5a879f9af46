"""Small questions to an engine, and requests that are passed on as they are."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from paceline.gateway.proxy.passthrough.passing import pass_on
from paceline.gateway.settings.config import EngineConfig, GatewayConfig
from paceline.gateway.upstreams.registry import fetch_small
from paceline.gateway.upstreams.upstream import Upstream

SECONDS: Final = 0.3


async def asked(engine: Upstream) -> bytes:
    return (await fetch_small(engine, "/metrics", SECONDS))[1]


async def passed(engine: Upstream) -> bytes:
    async with await pass_on(engine, "GET", "/v1/files", [], None, SECONDS) as answer:
        return await answer.whole()


@pytest.mark.parametrize("question", [asked, passed])
async def test_what_came_in_time_counts_though_the_loop_was_held_up(
    question: Callable[[Upstream], Awaitable[bytes]],
) -> None:
    """The answer and the end of its time are there at once when the loop goes on."""
    loop = asyncio.get_running_loop()
    held_up, sent = threading.Event(), threading.Event()

    def hold_up() -> None:
        held_up.set()
        assert sent.wait(10)
        time.sleep(SECONDS)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            loop.call_soon_threadsafe(hold_up)
            assert held_up.wait(10)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            sent.set()
            # until the other side has gone
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        config = EngineConfig(name="e1", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        engine = Upstream(config, GatewayConfig(engines=(config,)), loop.time())
        try:
            assert await question(engine) == b"hi"
        finally:
            engine.pool.close()
            await asyncio.to_thread(thread.join, 10)
