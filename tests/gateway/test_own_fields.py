"""Fields that the gateway adds to a request, at engines that refuse them: the request is sent once
more without them, and later ones at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    prefer_others,
    serving,
    streamed,
    text_of,
)
from tests.gateway.proxy.test_hedging import HEDGED, LATE, _known

PLAIN = Step(parts=chat_chunks(WORDS, ids=False, usage=False))


def refusing(message: dict[str, Any], status: int = 422) -> Step:
    body: Any = (
        {"detail": [{"type": "extra_forbidden", **message}]}
        if isinstance(message, dict)
        else message
    )
    return Step(status=status, parts=(json.dumps(body).encode(),), stream=False)


REFUSALS = (
    refusing({"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}),
    refusing({"loc": ["body", "stream_options", "include_usage"], "msg": "not permitted"}),
    refusing({"error": {"message": "Unrecognized request argument: stream_options"}}, 400),
    # in a stream, before a word of the answer
    Step(parts=(b'data: {"error": {"message": "unknown: include_usage", "code": 400}}\n\n',)),
)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_field_that_the_caller_did_not_send_is_left_out(path: str, refusal: Step) -> None:
    async with (
        scripted(refusal, PLAIN, models=("m", "n")) as engine,
        gateway_over(configured(engine, kinds={"e1": "openai"})) as (gateway, client),
    ):
        body = chat(stream=True) if path == CHAT else {"model": "m", "prompt": "hi", "stream": True}
        for _ in range(2):
            answer = await client.post(path, json=body)
            assert text_of(streamed(answer)) == "".join(WORDS)
            assert answer.headers["x-paceline-attempts"] == "1"
        assert ["stream_options" in sent for sent in engine.bodies] == [True, False, False]
        # of the other model nothing is known, and a caller's own field is the caller's
        await client.post(path, json={**body, "model": "n"})
        assert engine.bodies[-1]["stream_options"] == {"include_usage": True}
        own = {"include_usage": True, "x": 1}
        await client.post(path, json={**body, "stream_options": own})
        assert engine.bodies[-1]["stream_options"] == own and len(engine.bodies) == 5
        assert is_clean(gateway) and gateway.upstreams.by_name["e1"].breaker.state(0.0) == "closed"
        counted = (await client.get("/metrics")).text
        assert "attempt_failures_total{" not in counted


async def test_a_refusal_that_stays_is_the_callers() -> None:
    """It may repeat the request, with all its fields; then nothing is left out of others."""
    echo = refusing({"loc": ["body", "top_p"], "msg": "at most 1", "input": {"stream_options": {}}})
    async with serving(echo, kinds={"e1": "openai"}) as (engine, _, client):
        for sent in (2, 4):
            answer = await client.post(CHAT, json=chat(stream=True, top_p=3))
            assert answer.status_code == 422 and len(engine.bodies) == sent
            assert answer.json()["error"]["message"] == "top_p: at most 1"
            assert "stream_options" in engine.bodies[-2]
        mine = await client.post(
            CHAT, json=chat(stream=True, stream_options={"include_usage": True})
        )
        assert mine.status_code == 422 and len(engine.bodies) == 5


async def test_each_field_of_the_gateways_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, and together; what is left out is asked for again of an engine that was away."""

    def refuses(*names: str) -> Step:
        return refusing({"error": {"message": "unknown: " + ", ".join(names)}}, 400)

    monkeypatch.setenv("SALT", "s")
    script = (refuses("seed", "cache_salt"), refuses("return_token_ids"), PLAIN)
    keys = (ApiKey.of("ann", "user", "secret-ann"),)
    async with (
        scripted(*script) as engine,
        gateway_over(configured(engine, kinds={"e1": "paceline"}, salt_env="SALT"), keys) as (
            gateway,
            client,
        ),
    ):
        ann = {"authorization": "Bearer secret-ann"}
        answer = await client.post(CHAT, json=chat(stream=True), headers=ann)
        assert text_of(streamed(answer)) == "".join(WORDS)
        own = {"seed", "cache_salt", "return_token_ids", "stream_options"}
        assert [own & sent.keys() for sent in engine.bodies] == [
            own, {"return_token_ids", "stream_options"}, {"stream_options"},
        ]  # fmt: skip
        gateway.upstreams.by_name["e1"].came_back(0.0)
        await client.post(CHAT, json=chat(stream=True), headers=ann)
        assert own <= engine.bodies[-1].keys()


@pytest.mark.parametrize("refusal", [REFUSALS[0], REFUSALS[3]], ids=["status", "event"])
async def test_a_second_engine_is_asked_again_too(refusal: Step) -> None:
    async with (
        scripted(LATE, metrics=PACELINE_METRICS) as late,
        scripted(refusal, PLAIN, metrics=PACELINE_METRICS) as strict,
        gateway_over(configured(late, strict, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert answer.headers["x-paceline-engine"] == "e2" and len(strict.bodies) == 2


@pytest.mark.parametrize("code", [400, "422", 500])
async def test_a_refusal_in_a_stream_is_one(code: Any) -> None:
    error = {"error": {"message": "n must be 1", "code": code}}
    step = Step(parts=(f"data: {json.dumps(error)}\n\n".encode(),))
    async with serving(step, WHOLE) as (_, second, gateway, client):
        prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat(stream=True))
        if code == 500:
            assert answer.headers["x-paceline-engine"] == "e2"
        else:
            assert answer.status_code == int(code) and not second.bodies
            assert answer.json()["error"]["message"] == "n must be 1"
