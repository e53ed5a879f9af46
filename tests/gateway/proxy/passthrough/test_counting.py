"""Counting a prompt's tokens behind a gateway, and what is packed and what is not."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from paceline.gateway import EngineConfig, GatewayConfig
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import CHAT, chat, configured, gateway_over, serving

COUNT = "/v1/messages/count_tokens"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SAID = b'{"id":"x","model":"m","choices":[{"index":0,"message":{"content":"hi"}}]}'


def counts(body: dict[str, Any]) -> dict[str, int]:
    return {"input_tokens": len(body["messages"])}


async def test_an_engine_that_can_is_asked() -> None:
    """One that cannot is no failure, and nothing is generated."""
    async with (
        scripted(pages={COUNT: counts}) as can,
        scripted(pages={COUNT: (404, {"detail": "Not Found"})}) as cannot,
        scripted(pages={COUNT: (500, {"error": "no"})}) as broken,
        gateway_over(configured(cannot, broken, can)) as (_, client),
    ):
        for _ in range(6):
            answer = await client.post(COUNT, json=ASKED, headers={"anthropic-version": "1"})
            assert (answer.status_code, answer.json()) == (200, {"input_tokens": 1})
            assert answer.headers["x-paceline-engine"] == "e3"
        assert not can.bodies and COUNT in can.asked
        assert "attempt_failures_total{" not in (await client.get("/metrics")).text


async def test_errors_are_in_the_words_of_its_api() -> None:
    refusal = {"type": "error", "error": {"type": "invalid_request_error", "message": "no role"}}
    async with (
        scripted(pages={COUNT: (400, refusal)}) as engine,
        gateway_over(configured(engine)) as (_, client),
    ):
        answer = await client.post(COUNT, json=ASKED)
        assert (answer.status_code, answer.json()) == (400, refusal)
        for answer, status in (
            (await client.get(COUNT), 405),
            (await client.post(COUNT, json=ASKED | {"model": "other"}), 404),
            (await client.post(COUNT, content=b"["), 400),
        ):
            assert answer.status_code == status
            assert answer.json()["type"] == "error" and answer.json()["error"]["message"]
    async with (
        scripted(pages={COUNT: (404, {})}) as engine,
        gateway_over(configured(engine)) as (_, client),
    ):
        answer = await client.post(COUNT, json=ASKED)
        assert answer.status_code == 404 and COUNT in answer.json()["error"]["message"]


async def test_anthropics_own_engine_counts_too() -> None:
    """It is sent what its API knows."""
    seen: list[dict[str, Any]] = []

    def told(body: dict[str, Any]) -> dict[str, int]:
        seen.append(body)
        return counts(body)

    async with scripted(pages={COUNT: told}) as engine:
        place = EngineConfig(name="a", url=engine.url, kind="anthropic", models=("m",))
        config = GatewayConfig(engines=(place,))
        async with gateway_over(config) as (_, client):
            answer = await client.post(COUNT, json=ASKED | {"slo": "batch", "system": "s"})
    assert answer.json() == {"input_tokens": 1}
    assert seen == [ASKED | {"system": "s"}]


async def test_it_counts_as_a_request() -> None:
    async with (
        scripted(pages={COUNT: counts}) as engine,
        gateway_over(configured(engine, rate_limit_requests="2/minute")) as (_, client),
    ):
        statuses = [(await client.post(COUNT, json=ASKED)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", "identity", "None", "identity, none"])
async def test_an_answer_that_is_not_packed_may_say_so(said: str, stream: bool) -> None:
    parts = (
        (
            b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n',
            b"data: [DONE]\n\n",
        )
        if stream
        else (SAID,)
    )
    step = Step(parts=parts, headers=(("content-encoding", said),), stream=stream)
    async with serving(step) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 200 and "content-encoding" not in answer.headers


@pytest.mark.parametrize("path", [CHAT, COUNT, "/v1/batches"])
async def test_a_packed_body_is_named_as_that(path: str) -> None:
    body = gzip.compress(json.dumps(ASKED).encode())
    async with scripted() as engine, gateway_over(configured(engine)) as (_, client):
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await client.post(path, content=body, headers=headers)
        assert answer.status_code == 400
        assert "Content-Encoding 'gzip' is not served" in answer.json()["error"]["message"]
        assert not engine.bodies
