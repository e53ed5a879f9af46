"""Requests that may not leave: no byte of one reaches a cloud, whatever the local engine does."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.gateway.routing.data_policy import NO_POLICY, data_policy
from paceline.gateway.settings.cascade import CascadeConfig
from paceline.gateway.settings.config import KeyConfig, ModelConfig
from paceline.http.keys import ApiKey
from tests.gateway.cascade.helpers import calibration, said, told
from tests.gateway.fault_server import Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    ANY,
    CHAT,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    prefer_others,
    refused,
    until,
)

FAULTS = {
    "good": said("fine", -0.1),
    "unsure": said("fine", -5.0),
    "stream": told(["f", "i", "n", "e"], -5.0, -5.0, -5.0, -5.0),
    "refusal": said("I'm sorry, but I can't."),
    **{
        str(status): refused(status)
        for status in (400, 401, 402, 403, 404, 500, 501, 502, 503, 504)
    },
    "429": refused(429, retry_after="1"),
    "page": Step(parts=(b"<html>",), stream=False),
    "no head": Step(raw=b""),
    "garbage": Step(raw=b"SSH-2.0-x\r\n"),
    "cut": Step(parts=chat_chunks(WORDS)[:3], then="cut"),
    "stall": Step(parts=chat_chunks(WORDS)[:2], then="stall"),
    "half an object": Step(parts=(b'{"choices": [',), stream=False),
    "late": Step(parts=chat_chunks(WORDS), delay=0.5),
    "slow": Step(parts=chat_chunks(WORDS), gap=0.25),
    "behind": Step(parts=chat_chunks(WORDS), behind=b"HTTP/1.1 200 OK\r\n\r\n"),
    # to the cloud, whose address takes the place of the words
    "moved": refused(307, location="cloud"),
}
# whole answers, also to those who asked for a stream
ANSWERS = ("good", "unsure", "refusal", "closes")
# streams of a chat or a completion that begin
BEGIN = ("stream", "cut", "stall", "slow", "behind")
# an engine is there, and says this of the request or of its caller
TOLD = ("400", "404", "429", "501")
# of the engine rather than of one answer; "dead": its port is closed
ENGINES: dict[str, Any] = {"frozen": {"frozen": True}, "closes": {"closes": True}, "dead": {}}
KEYS = tuple(ApiKey.of(name, "user", name * 8) for name in ("ann", "bob"))
RULES: dict[str, Any] = {
    "keys": (KeyConfig(name="ann", local_only=True),),
    "local_only_tags": ("private",),
    "local_only_patterns": (r"\b\d{3}-\d{2}-\d{4}\b",),
}
# key, header of tags, text: what keeps a request in
REASONS = (("ann", "", "hi"), ("bob", "hr, Private", "hi"), ("bob", "", "it is 078-05-1120"))


def post(
    http: httpx.AsyncClient, path: str, reason: tuple[str, str, str], body: dict[str, Any]
) -> Any:
    key, tags, _ = reason
    headers = {"authorization": f"Bearer {key * 8}", "x-paceline-tags": tags}
    return http.post(path, json=body, headers=headers)


APIS: dict[str, Any] = {
    CHAT: lambda model, stream, text: chat(
        model=model, stream=stream, messages=[{"role": "user", "content": text}]
    ),
    "/v1/completions": lambda model, stream, text: {
        "model": model, "stream": stream, "prompt": text,
    },
    "/v1/responses": lambda model, stream, text: {
        "model": model, "stream": stream, "input": text, "store": False,
    },
    "/v1/messages": lambda model, stream, text: {
        "model": model, "stream": stream, "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
    },
}  # fmt: skip

ASKED = {
    "fault": st.sampled_from(sorted({*FAULTS, *ENGINES})),
    "mode": st.sampled_from(["route", "cascade", "prefix"]),
    "reason": st.sampled_from(REASONS),
    "stream": st.booleans(),
    "model": st.sampled_from(["chat", "far", "small", "own"]),
    "path": st.sampled_from(sorted(APIS)),
}


def status_of(fault: str, stream: bool, path: str) -> int:
    """The status of a request for which one local engine is there; exactly 503 where that is as
    good as down."""
    if fault in TOLD:
        return int(fault)
    begins = stream and fault in BEGIN and path in (CHAT, "/v1/completions")
    return 200 if fault in ANSWERS or begins else 503


@settings(max_examples=25, deadline=None)
@given(**ASKED)
@example(fault="good", mode="route", reason=REASONS[0], stream=False, model="chat", path=CHAT)
@example(fault="stream", mode="prefix", reason=REASONS[0], stream=True, model="chat", path=CHAT)
@example(
    fault="good", mode="prefix", reason=REASONS[2], stream=False, model="chat", path="/v1/messages"
)
def test_no_byte_reaches_a_cloud_under_any_fault(**asked: Any) -> None:
    asyncio.run(_no_byte(**asked))


@pytest.mark.thorough
@settings(max_examples=500, deadline=None)
@given(**ASKED)
def test_no_byte_reaches_a_cloud_under_any_fault_at_length(**asked: Any) -> None:
    asyncio.run(_no_byte(**asked))


@pytest.mark.parametrize("fault", sorted({*FAULTS, *ENGINES}))
def test_each_fault_leaves_the_cloud_alone(fault: str) -> None:
    for stream in (False, True):
        mode = "prefix" if stream else "cascade"
        asyncio.run(_no_byte(fault, mode, REASONS[0], stream, "chat", CHAT))
        for path in sorted(APIS):
            asyncio.run(_no_byte(fault, mode, REASONS[0], stream, "own", path))


def test_the_faults_are_all_that_the_fault_server_has() -> None:
    steps = list(FAULTS.values())
    for field in fields(Step):
        assert len({getattr(step, field.name) for step in steps}) > 1, field.name
    assert {step.then for step in steps} == {"end", "cut", "stall"}
    whole = {field.name for field in fields(Engine) if field.type == "bool"}
    assert whole == {name for of_engine in ENGINES.values() for name in of_engine}


async def _no_byte(
    fault: str, mode: Any, reason: tuple[str, str, str], stream: bool, model: str, path: str
) -> None:
    calibrated, kept = PATHS[0], Path(PATHS[0]).with_name("kept")
    models = (
        ModelConfig(
            name="chat", tiers=(("e2:m",),), length_over={"9": "far"},
            # whatever could ask a second model besides
            cascade=CascadeConfig(
                small="small", mode=mode, calibration=calibrated, prefix_tokens=2, shadow=1.0,
                early_prefill=1.0 if mode == "prefix" else 0.0, shadow_file=str(kept),
            ),
        ),
        ModelConfig(name="small", tiers=(("e1:m",), ("e2:m",))),
        # a cloud alone, and a model that keeps everything
        ModelConfig(name="far", tiers=(("e2:m",),)),
        ModelConfig(name="own", tiers=(("e2:m",), ("e1:m",)), local_only=True),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        two = await stack.enter_async_context(scripted(said("cloud")))
        step = FAULTS.get(fault, FAULTS["good"])
        if fault == "moved":
            step = replace(step, headers=(("location", f"{two.url}{path}"),))
        one = await stack.enter_async_context(scripted(step))
        if fault == "dead":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                one.port = closed.getsockname()[1]
        config = configured(
            one, two, models=models, engine_fields={"e2": {"cloud": True}}, hedge_share=0.5,
            stall_timeout=0.2, first_byte_timeout=0.3, spend_storage="", **RULES,
        )  # fmt: skip
        gateway, http = await stack.enter_async_context(gateway_over(config, KEYS))
        gateway.hedges._saved = 5.0
        for name, value in ENGINES.get(fault, {}).items():
            setattr(one, name, value)
        response = await post(http, path, reason, APIS[path](model, stream, reason[2]))
        assert two.bodies == [] and two.paths == []
        assert "cloud" not in response.text.replace("to a cloud", "").replace("are clouds", "")
        # a long prompt would go there, too; how long one is depends on the API
        told_far = model == "chat" and "engines of far" in response.text
        if is_far := model == "far" or told_far:
            assert response.status_code == 503 and "may not go to a cloud" in response.text
        else:
            assert response.status_code == status_of(fault, stream, path), response.text
            if response.status_code == 503:
                assert response.json()["error"] and response.headers["retry-after"]
        if fault == "good" and model == "chat" and not stream and path == CHAT and not is_far:
            assert response.json()["choices"][0]["message"]["content"] == "fine"
            assert 'why="local_only"' in response.headers["x-paceline-cascade"]
        await until(lambda: is_clean(gateway))
        # and no prompt of it is kept
        assert two.bodies == [] and not kept.exists()


PATHS: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> None:
    PATHS[:] = [calibration(tmp_path_factory.mktemp("calibration"))]


async def test_without_a_rule_the_cloud_is_asked() -> None:
    """The same engines and requests, but for what keeps them in."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted(refused(503)))
        two = await stack.enter_async_context(scripted(said("cloud")))
        more = {"engine_fields": {"e2": {"cloud": True}}, **RULES}
        config = configured(one, two, spend_storage="", **more)
        _, http = await stack.enter_async_context(gateway_over(config, KEYS))
        for reason in REASONS:
            # models that keep the names of the engines
            body = chat(messages=[{"role": "user", "content": reason[2]}])
            assert (await post(http, CHAT, reason, body)).status_code == 503
        assert not two.bodies
        assert (await post(http, CHAT, ("bob", "public", ""), chat())).status_code == 200
        assert len(two.bodies) == 1


async def test_counting_and_files_stay_in_too() -> None:
    pages = {"/v1/files": {"id": "file-1"}}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted(ANY, pages=pages))
        two = await stack.enter_async_context(scripted(ANY, pages=pages))
        more = {"engine_fields": {"e2": {"cloud": True}}, **RULES}
        config = configured(one, two, spend_storage="", **more)
        gateway, http = await stack.enter_async_context(gateway_over(config, KEYS))
        prefer_others(gateway, "e1")

        async def send(key: str, tags: str, text: str) -> None:
            body = chat(messages=[{"role": "user", "content": text}])
            await post(http, "/v1/messages/count_tokens", (key, tags, text), body)
            line = '{"body": {"model": "m", "messages": [{"content": "TEXT"}]}}\n'
            # as some encoders write it
            line = line.replace("TEXT", text.replace("-", "\\u002d"))
            headers = {"authorization": f"Bearer {key * 8}", "x-paceline-tags": tags}
            files = {"file": ("x.jsonl", line)}
            await http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)

        for reason in REASONS:
            await send(*reason)
        assert two.paths == [] and "/v1/files" not in two.asked
        assert len(one.paths) == len(REASONS) == one.asked.count("/v1/files")
        for _ in range(20):
            await send("bob", "", "hi")
        assert two.paths and "/v1/files" in two.asked


async def test_no_cloud_is_asked_for_what_it_stores() -> None:
    pages = {
        "/v1/files": {"data": [{"id": "file-1"}]},
        "/v1/files/file-1": {"id": "file-1"},
        "/v1/responses/resp_1": {"id": "resp_1"},
        "/v1/batches": {"id": "batch_1"},
    }
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted(ANY))
        two = await stack.enter_async_context(scripted(ANY, pages=pages))
        three = await stack.enter_async_context(scripted(ANY))
        more = {"engine_fields": {"e2": {"cloud": True}}, **RULES}
        config = configured(one, two, three, spend_storage="", **more)
        _, http = await stack.enter_async_context(gateway_over(config, KEYS))

        async def statuses(key: str, tags: str) -> list[int]:
            headers = {"authorization": f"Bearer {key * 8}", "x-paceline-tags": tags}
            made = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
            follows = {"model": "m", "input": "hi", "previous_response_id": "resp_1"}
            asked = [
                await http.get("/v1/files", headers=headers),
                await http.get("/v1/files/file-1", headers=headers),
                await http.get("/v1/responses/resp_1", headers=headers),
                await http.post("/v1/batches", json=made, headers=headers),
                await http.post("/v1/responses", json=follows, headers=headers),
            ]
            return [response.status_code for response in asked]

        before = list(two.asked)
        for key, tags in (("ann", ""), ("bob", "private")):
            assert await statuses(key, tags) == [200, 404, 404, 404, 404]
            assert two.asked == before and not two.bodies
        # where a cloud is known to have it, too
        assert await statuses("bob", "") == [200] * 5
        assert await statuses("bob", "private") == [200, 404, 404, 404, 404]


async def test_several_choices_stay_in_with_the_small_model() -> None:
    models = (
        ModelConfig(name="chat", tiers=(("e2:m",),), cascade=CascadeConfig(small="small")),
        ModelConfig(name="small", tiers=(("e1:m",),)),
    )
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted(said("fine")))
        two = await stack.enter_async_context(scripted(said("cloud")))
        more = {"engine_fields": {"e2": {"cloud": True}}, **RULES}
        config = configured(one, two, models=models, spend_storage="", **more)
        _, http = await stack.enter_async_context(gateway_over(config, KEYS))
        response = await post(http, CHAT, REASONS[0], chat(model="chat", n=2))
        assert response.status_code == 200 and one.bodies[0]["n"] == 2
        assert 'why="local_only"' in response.headers["x-paceline-cascade"] and not two.bodies


async def test_a_header_of_tags_that_is_there_twice_counts_twice() -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted(refused(503)))
        two = await stack.enter_async_context(scripted(said("cloud")))
        more = {"engine_fields": {"e2": {"cloud": True}}, **RULES}
        config = configured(one, two, spend_storage="", **more)
        _, http = await stack.enter_async_context(gateway_over(config, KEYS))
        tags = [("x-paceline-tags", "private"), ("x-paceline-tags", "hr")]
        for told in (tags, tags[::-1]):
            headers = [("authorization", f"Bearer {'bob' * 8}"), *told]
            assert (await http.post(CHAT, json=chat(), headers=headers)).status_code == 503
        assert not two.bodies


def test_no_rule_costs_nothing() -> None:
    config = configured()
    assert data_policy(config) is NO_POLICY
