"""Prompts and answers apart with real engines of Paceline, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from paceline.backends.reference.null import expected_tokens
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core, build_tokenizer
from paceline.engine.local import LocalEngineClient
from paceline.gateway import EngineConfig, GatewayConfig
from paceline.http.listening import bind
from paceline.server import ServerConfig, create_app
from tests.gateway.helpers import gateway_over, prefer_others, streamed, until

COMPLETIONS = "/v1/completions"
NULL = EngineSettings.of(
    model_name="null", model_path=None, backend="null", num_blocks=256, max_num_batched_tokens=64,
    max_num_seqs=8, speculative_config={"method": "off"}, kv_port=0,
    null_step_time=0.01,
)  # fmt: skip
VOCABULARY = 259


@asynccontextmanager
async def engine(settings: EngineSettings) -> AsyncIterator[tuple[str, LocalEngineClient]]:
    """An engine and its server in this process; yields its URL."""
    core, info = build_core(settings)
    client = LocalEngineClient(core, info, build_tokenizer(settings))
    listener = bind("127.0.0.1", 0)
    app = create_app(client, ServerConfig())
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", client
    finally:
        server.should_exit = True
        await running
        await client.close()


@asynccontextmanager
async def apart(
    monkeypatch: pytest.MonkeyPatch, *keys: str
) -> AsyncIterator[tuple[Any, httpx.AsyncClient, list[LocalEngineClient]]]:
    """P and D, each with its own key for blocks, behind a gateway."""
    async with AsyncExitStack() as stack:
        engines, clients = [], []
        for number, (role, key) in enumerate(zip(("prompts", "outputs"), keys, strict=True)):
            monkeypatch.setenv("PACELINE_KV_KEY", key)
            url, client = await stack.enter_async_context(engine(NULL))
            clients.append(client)
            engines.append(
                EngineConfig(name=f"e{number}", url=url, kind="paceline", role=role)  # type: ignore[arg-type]
            )
        config = GatewayConfig(engines=tuple(engines), split_above=32, poll_interval=0.05)
        gateway, http = await stack.enter_async_context(gateway_over(config))
        ups = gateway.upstreams
        await until(lambda: all(ups.is_probed(e) and e.models for e in ups.by_name.values()))
        prefer_others(gateway, "e1")
        yield gateway, http, clients


def prompt(length: int, seed: int = 0) -> list[int]:
    return [2 + (7 * n + seed) % 200 for n in range(length)]


def body(tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": "null", "prompt": tokens, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


def ids_of(response: httpx.Response) -> list[int]:
    chunks = [c for c in streamed(response) if c != "[DONE]"]
    return [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or ()]


def fetched(client: LocalEngineClient) -> dict[str, int]:
    blocks = client.stats.blocks
    return {} if blocks is None else {result: n for _, result, n in blocks.fetched}


async def test_streams_are_those_of_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with apart(monkeypatch, "shared", "shared") as (_, http, (_, d)):
        usage = {"stream_options": {"include_usage": True}}
        asked = [prompt(160, seed) for seed in range(4)]
        sent = [http.post(COMPLETIONS, json=body(each, stream=True, **usage)) for each in asked]
        for tokens, answer in zip(asked, await asyncio.gather(*sent), strict=True):
            assert ids_of(answer) == expected_tokens(tokens, 40, VOCABULARY)
            last = [c for c in streamed(answer) if c != "[DONE]"][-1]["usage"]
            assert (last["prompt_tokens"], last["completion_tokens"]) == (160, 40)
        assert fetched(d) == {"hit": 4 * 160}
        text = (await http.get("/metrics")).text
        assert 'paceline:gateway_handed_total{engine="e0",result="handed"} 4' in text


async def test_a_whole_answer_is_that_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with apart(monkeypatch, "shared", "shared") as (_, http, (_, d)):
        whole = await http.post(COMPLETIONS, json=body(prompt(1000, 9)))
        assert whole.headers["x-paceline-prompt-engine"] == "e0"
        ids = whole.json()["choices"][0]["token_ids"]
        assert ids == expected_tokens(prompt(1000, 9), 40, VOCABULARY)
        # the last block is never whole
        assert fetched(d) == {"hit": 992}


async def test_a_wrong_key_has_the_prompt_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with apart(monkeypatch, "one", "another") as (_, http, (_, d)):
        answer = await http.post(COMPLETIONS, json=body(prompt(160), stream=True))
        assert ids_of(answer) == expected_tokens(prompt(160), 40, VOCABULARY)
        assert "hit" not in fetched(d) and "e1" in answer.text


async def test_an_engine_that_goes_before_its_blocks_are_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with apart(monkeypatch, "shared", "shared") as (gateway, http, (_, d)):
        # nothing listens there any more
        gateway.upstreams.by_name["e0"].capabilities.kv = (
            9, gateway.upstreams.by_name["e1"].capabilities.kv[1],
        )  # fmt: skip
        answer = await http.post(COMPLETIONS, json=body(prompt(160), stream=True))
        assert ids_of(answer) == expected_tokens(prompt(160), 40, VOCABULARY)
        assert "hit" not in fetched(d)
