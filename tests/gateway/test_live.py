"""A gateway before real servers, of which one is killed, stopped or cut off under its streams."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gateway import EngineConfig, Gateway, GatewayConfig
from tests.gateway.helpers import CHAT, NO_TLS, gateway_over, streamed
from tests.server.live_process import LiveServer

STEP_SECONDS = 0.02
SETTINGS = {"backend": {"step_time": STEP_SECONDS}}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["north-north-west", "south-by-south"]}},
    "required": ["place"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 8, "frequency_penalty": 0.5, "min_tokens": 20},
    "stops": {"temperature": 0.9, "seed": 9, "stop": ["zq", "~"]},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "two": {"n": 2, "temperature": 0.7, "seed": 11},
    "logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The one that nothing happens to."""
    server = LiveServer(tmp_path_factory.mktemp("live") / "b.log", SETTINGS)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def uncut(lives: LiveServer) -> list[dict[str, Any]]:
    """What it says to each of ``BODIES``."""

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=30, verify=NO_TLS) as direct:
            sent = [direct.post(lives.url + CHAT, json=each) for each in BODIES]
            return [told(response) for response in await asyncio.gather(*sent)]

    return asyncio.run(ask())


@pytest.fixture
def dies(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "a.log", SETTINGS)
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.stop()


def body(kind: str, number: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Tell me {number}."}],
        "max_tokens": 80,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[kind],
    }


BODIES = [body(kind, number) for number in range(2) for kind in KINDS]


def told(response: httpx.Response) -> dict[str, Any]:
    """What a stream says, however it was cut."""
    chunks = streamed(response)
    assert chunks.pop() == "[DONE]"
    texts: dict[int, str] = {}
    calls: dict[int, str] = {}
    names: list[str] = []
    ends: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        index, delta = choice["index"], choice["delta"]
        texts[index] = texts.get(index, "") + (delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            names += [call["function"]["name"]] if call["function"].get("name") else []
            calls[index] = calls.get(index, "") + (call["function"].get("arguments") or "")
        if choice.get("logprobs"):
            logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
        if choice["finish_reason"]:
            ends[index] = choice["finish_reason"]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {
        "errors": [chunk["error"] for chunk in chunks if "error" in chunk],
        "texts": texts,
        "calls": calls,
        "names": names,
        "ends": ends,
        "logprobs": logprobs,
        "tokens": [u["completion_tokens"] for u in usage],
    }


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.thorough),
    ],
)
async def test_every_stream_ends_as_if_nothing_had_happened(
    dies: LiveServer, lives: LiveServer, uncut: list[dict[str, Any]], how: signal.Signals
) -> None:
    config = GatewayConfig(
        engines=(EngineConfig(name="a", url=dies.url), EngineConfig(name="b", url=lives.url)),
        poll_interval=0.1,
        liveness_timeout=0.6,
    )
    async with gateway_over(config) as (gateway, client):
        gateway.upstreams.by_name["b"].load.prefill_tokens += 1e6
        sent = [asyncio.ensure_future(client.post(CHAT, json=each)) for each in BODIES]
        await _until_tokens(gateway, 6)
        gateway.upstreams.by_name["b"].load.prefill_tokens -= 1e6
        dies.signal(how)
        found = [told(response) for response in await asyncio.gather(*sent)]
        resumed = gateway.metrics.render(gateway.upstreams.by_name.values(), 0, gateway.now())
    for kind, one, other in zip([*KINDS, *KINDS], found, uncut, strict=True):
        assert one == other, kind
    assert 'paceline:gateway_resumed_total{engine="b"}' in resumed


async def _until_tokens(gateway: Gateway, count: int) -> None:
    """Until every stream at engine a has so many tokens."""
    async with asyncio.timeout(20):
        while True:
            attempts: list[Any] = list(gateway.upstreams.by_name["a"].running)
            made = [attempt._owner.relay.num_output_tokens for attempt in attempts]
            if len(made) >= len(KINDS) and min(made) >= count:
                return
            await asyncio.sleep(0.005)
