"""The vendors' own clients before a gateway, with a server that is killed behind it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from paceline.gateway import EngineConfig, GatewayConfig
from tests.gateway.helpers import gateway_over
from tests.server.live_process import LiveServer

SETTINGS = {"backend": {"step_time": 0.01}}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LiveServer]]:
    found = [LiveServer(tmp_path / f"{name}.log", SETTINGS) for name in ("a", "b")]
    yield found
    for server in found:
        server.stop()


def config(servers: list[LiveServer]) -> GatewayConfig:
    engines = (EngineConfig(name=n, url=s.url) for n, s in zip("ab", servers, strict=True))
    return GatewayConfig(engines=tuple(engines), poll_interval=0.1)


async def test_openais(servers: list[LiveServer]) -> None:
    async with gateway_over(config(servers)) as (gateway, http):
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        (model,) = (await client.models.list()).data
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [
            {"role": "user", "content": "hi"}
        ]
        whole = await client.chat.completions.create(
            model=model.id, messages=messages, max_tokens=60, seed=3, temperature=0.7
        )
        gateway.upstreams.by_name["b"].load.prefill_tokens += 1e6
        stream = await client.chat.completions.create(
            model=model.id, messages=messages, max_tokens=60, seed=3, temperature=0.7, stream=True
        )
        text, chunks = "", 0
        async for chunk in stream:
            chunks += 1
            if chunks == 10:
                servers[0].signal(signal.SIGKILL)
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage is not None and whole.usage.completion_tokens == 60
        response = await client.responses.create(model=model.id, input="hi", max_output_tokens=5)
        assert response.status in ("completed", "incomplete")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
        await client.close()


async def test_anthropics(servers: list[LiveServer]) -> None:
    async with gateway_over(config(servers)) as (gateway, http):
        client = anthropic.AsyncAnthropic(
            base_url=str(http.base_url), api_key="none", max_retries=0
        )
        (name,) = gateway.routes.names()
        told = ""
        async with client.messages.stream(
            model=name, max_tokens=8, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            async for text in stream.text_stream:
                told += text
        assert (await stream.get_final_message()).content[0].type == "text" and told
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(
                model="nope", max_tokens=8, messages=[{"role": "user", "content": "hi"}]
            )
        await client.close()
