"""Where a gateway sends a request, and where it never does: tiers, models, places that are drained,
pressed or cannot serve it."""

from __future__ import annotations

import pytest

from paceline.gateway import ModelConfig
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Step, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    chat,
    configured,
    gateway_over,
    refused,
    serving,
    until,
)


async def test_later_tiers_serve_what_earlier_ones_cannot() -> None:
    model = ModelConfig(name="chat", tiers=(("e1",), ("e2:small",)))
    async with (
        scripted(refused(503), models=("big",)) as big,
        scripted(WHOLE, models=("small",)) as small,
        gateway_over(configured(big, small, models=(model,))) as (_, client),
    ):
        response = await client.post(CHAT, json=chat(model="chat"))
        assert response.headers["x-paceline-fallback"] == "small"
        assert response.json()["model"] == "chat"
        assert response.json()["paceline"]["fallback"] == "small"
        assert (big.bodies[0]["model"], small.bodies[0]["model"]) == ("big", "small")
        forbidden = await client.post(
            CHAT, json=chat(model="chat"), headers={"x-paceline-allow": "retry, resume"}
        )
        assert forbidden.status_code == 503 and len(small.bodies) == 1
        listed = (await client.get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["chat"]


async def test_a_long_prompt_goes_to_the_long_model() -> None:
    models = (
        ModelConfig(name="chat", tiers=(("e1:m",),), length_over={"100": "long"}),
        ModelConfig(name="long", tiers=(("e2:m",),)),
    )
    async with serving(WHOLE, WHOLE, models=models) as (short, long, _, client):
        await client.post(CHAT, json=chat(model="chat"))
        words = [{"role": "user", "content": "word " * 200}]
        await client.post(CHAT, json=chat(model="chat", messages=words))
        assert (len(short.bodies), len(long.bodies)) == (1, 1)


async def test_local_only_holds_for_the_model_of_long_prompts() -> None:
    """Which is another entry, and need not say it again."""
    models = (
        ModelConfig(name="chat", tiers=(("e1:m",),), local_only=True, length_over={"100": "long"}),
        ModelConfig(name="long", tiers=(("e2:m", "e1:m"),)),
    )
    words = [{"role": "user", "content": "word " * 200}]
    for step in (WHOLE, refused(503), refused(400)):
        async with (
            scripted(step) as local,
            scripted(WHOLE) as far,
            gateway_over(
                configured(local, far, models=models, engine_fields={"e2": {"cloud": True}})
            ) as (gateway, client),
        ):
            for _ in range(4):
                await client.post(CHAT, json=chat(model="chat", messages=words))
                await client.post(CHAT, json=chat(model="chat"))
            assert local.bodies and not far.bodies
            route = gateway.routes.find("chat", 10.0)
            assert route.longer is not None and route.longer.local_only
            # who asks for the other one itself may be served anywhere
            await client.post(CHAT, json=chat(model="long"))
            assert len(gateway.routes.find("long", 10.0).tiers[0]) == 2


async def test_local_only_never_leaves_the_house() -> None:
    model = ModelConfig(name="chat", tiers=(("e1:m",), ("e2:m",)), local_only=True)
    cloud = {"e2": {"cloud": True}}
    async with (
        scripted(refused(503)) as local,
        scripted(GOOD) as far,
        gateway_over(configured(local, far, models=(model,), engine_fields=cloud)) as (_, client),
    ):
        assert (await client.post(CHAT, json=chat(model="chat"))).status_code == 503
        assert not far.bodies


async def test_memory_pressure_sends_on_where_that_is_wanted() -> None:
    model = ModelConfig(name="chat", tiers=(("e1:m",), ("e2:m",)), pressure_fallback=True)
    pressed = PACELINE_METRICS.replace("pressure_level 0.0", "pressure_level 3.0")
    async with (
        scripted(WHOLE, metrics=pressed) as full,
        scripted(WHOLE, metrics=PACELINE_METRICS) as free,
        gateway_over(configured(full, free, models=(model,))) as (gateway, client),
    ):
        response = await client.post(CHAT, json=chat(model="chat"))
        assert response.headers["x-paceline-engine"] == "e2"
        full.metrics = PACELINE_METRICS
        await until(lambda: not gateway.upstreams.by_name["e1"].load.pressed)
        response = await client.post(CHAT, json=chat(model="chat"))
        assert response.headers["x-paceline-engine"] == "e1"
        assert len(free.bodies) == 1


async def test_an_engine_can_be_drained() -> None:
    keys = (ApiKey.of("root", "admin", "secret-admin"), ApiKey.of("ann", "user", "secret-ann"))
    admin = {"authorization": "Bearer secret-admin"}
    user = {"authorization": "Bearer secret-ann"}
    async with serving(WHOLE, WHOLE, callers=keys) as (one, two, _, client):
        assert (await client.post(CHAT, json=chat())).status_code == 401
        for path in ("/status", "/metrics"):
            assert (await client.get(path, headers=user)).status_code == 403
        refused_to_user = await client.post("/admin/engines/e1/drain", headers=user)
        assert refused_to_user.status_code == 403
        assert (await client.post("/admin/engines/e1/drain", headers=admin)).status_code == 200
        for _ in range(4):
            assert (await client.post(CHAT, json=chat(), headers=user)).status_code == 200
        assert (len(one.bodies), len(two.bodies)) == (0, 4)
        # the caller's key goes no further
        assert "authorization" not in two.headers[0] and "x-api-key" not in two.headers[0]
        status = (await client.get("/status", headers=admin)).json()
        assert status["engines"]["e1"]["trouble"] == "draining"
        await client.post("/admin/engines/e1/undrain", headers=admin)
        await client.post("/admin/engines/e2/drain", headers=admin)
        assert (await client.post(CHAT, json=chat(), headers=user)).status_code == 200
        assert len(one.bodies) == 1


async def test_what_is_not_there_is_named() -> None:
    async with serving(GOOD) as (_, _, client):
        for path, body, status, words in (
            (CHAT, chat(model="nope"), 404, "served: m"),
            (CHAT, chat(model=3), 400, "model must be a string, got 3"),
            ("/v1/other", {}, 404, "there is no /v1/other here"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == status
            assert words in response.json()["error"]["message"]
        broken = await client.post(
            CHAT, content=b"{oops", headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        assert (await client.get(CHAT)).status_code == 405
        anthropic = await client.post("/v1/messages", json=chat(model="nope"))
        assert anthropic.json()["error"]["type"] == "not_found_error"


async def test_vectors_go_to_engines_that_have_them() -> None:
    ranked = Step(
        parts=(b'{"model":"m","results":[{"index":0,"relevance_score":1.0}]}',), stream=False
    )
    kinds = {"e1": "llama.cpp", "e2": "vllm", "e3": "openai"}
    async with (
        scripted(ranked, pages={"/props": {}}) as llama,
        scripted(ranked) as vllm,
        scripted(ranked) as openai,
        gateway_over(configured(llama, vllm, openai, kinds=kinds)) as (_, client),
    ):
        pair = {"model": "m", "query": "a", "documents": ["a", "b"], "text_1": "a", "text_2": "b"}
        for path in ("/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"):
            for _ in range(3):
                answer = await client.post(path, json=pair)
                assert answer.headers["x-paceline-engine"] == "e2", (path, answer.text)
        assert answer.json()["results"][0]["relevance_score"] == 1.0
        assert vllm.bodies[-1]["documents"] == ["a", "b"]
        both = {(await client.post("/rerank", json=pair)).headers["x-paceline-engine"]
                for _ in range(12)}  # fmt: skip
        assert both == {"e1", "e2"} and not openai.bodies
        assert (await client.get("/rerank")).status_code == 405
    alone = {"e1": "openai"}
    async with serving(ranked, kinds=alone) as (_, _, client):
        answer = await client.post("/rerank", json=pair)
        assert answer.status_code == 400
        assert "e1: openai has no /rerank" in answer.json()["error"]["message"]
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("sglang", "/v1/rerank", b'[{"score":1.0,"document":"a","index":0}]'),
        ("vllm", "/v1/embeddings", b"\x00\x00\x80?"),
    ],
)
async def test_answers_with_vectors_are_not_always_objects(
    kind: str, path: str, body: bytes
) -> None:
    async with serving(Step(parts=(body,), stream=False), kinds={"e1": kind}) as (_, _, client):
        answer = await client.post(path, json={"model": "m", "input": "a", "query": "a"})
        assert (answer.status_code, answer.content) == (200, body)
