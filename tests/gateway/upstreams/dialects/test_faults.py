"""Engines of every dialect that answer, refuse and die, behind a gateway: what callers of chat
completions see, read by the vendors' own clients and types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import openai
import pytest

from paceline.gateway import EngineConfig, GatewayConfig, ModelConfig
from tests.gateway.fault_server import Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WHOLE,
    chat,
    configured,
    gateway_over,
    prefer_others,
    streamed,
    text_of,
    until,
)
from tests.gateway.upstreams.dialects.samples import (
    ANTHROPIC_ERRORS,
    ANTHROPIC_TOOL_STREAM,
    ANTHROPIC_WHOLE,
    AZURE_ERRORS,
    anthropic_events,
    azure_chunks,
)

WORDS = ("Once", " upon", " a", " time", ".")


@dataclass(frozen=True)
class Spoken:
    """A dialect as an engine speaks it."""

    kind: str
    # a stream, and how many of its events come before the second word and the end
    events: Sequence[bytes]
    to_second_word: int
    fields: dict[str, Any]
    error: bytes
    key_header: str


SPOKEN = {
    "openai": Spoken(
        "openai", chat_chunks(WORDS, ids=False), 2, {}, b'data: {"error":{"message":"x"}}\n\n',
        "authorization",
    ),
    "azure": Spoken(
        "azure", azure_chunks(WORDS), 3, {"api_version": "2024-10-21"},
        b'data: {"error":{"message":"x","code":"server_error"}}\n\n', "api-key",
    ),
    "anthropic": Spoken(
        "anthropic", anthropic_events(WORDS), 4, {},
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
        "x-api-key",
    ),
}  # fmt: skip


def config(spoken: Spoken, *engines: Engine, **fields: Any) -> GatewayConfig:
    found = tuple(
        EngineConfig(
            name=f"e{number}",
            url=engine.url,
            kind=spoken.kind,  # type: ignore[arg-type]
            models=("m",),
            api_key_env="UPSTREAM_KEY",
            **spoken.fields,
        )
        for number, engine in enumerate(engines, 1)
    )
    return GatewayConfig(engines=found, **fields)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-upstream")


@pytest.fixture(params=SPOKEN)
def spoken(request: pytest.FixtureRequest) -> Spoken:
    return SPOKEN[request.param]


async def test_a_stream_comes_through(spoken: Spoken) -> None:
    async with (
        scripted(Step(parts=tuple(spoken.events))) as engine,
        gateway_over(config(spoken, engine)) as (_, http),
    ):
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0)
        text, usage, ends = "", None, []
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
        assert text == "".join(WORDS) and ends == ["stop"]
        assert usage is not None and usage.completion_tokens == 5
        await client.close()
        (headers,) = engine.headers
        assert "sk-upstream" in headers[spoken.key_header]
        others = {"authorization", "api-key", "x-api-key"} - {spoken.key_header}
        assert not others & set(headers)
        # who asked for no usage gets none
        assert "usage" not in (await http.post(CHAT, json=chat(stream=True))).text


async def test_paths_and_bodies(spoken: Spoken) -> None:
    async with (
        scripted(Step(parts=tuple(spoken.events))) as engine,
        gateway_over(config(spoken, engine)) as (_, http),
    ):
        asked = chat(stream=True, slo={"ttft_ms": 500}, cache_salt="x", seed=3)
        answer = await http.post(CHAT, json=asked)
        (path,), (body,) = engine.paths, engine.bodies
        ignored = answer.headers.get("x-paceline-ignored-fields", "")
        if spoken.kind == "azure":
            assert path == "/openai/deployments/m/chat/completions?api-version=2024-10-21"
            assert "slo" not in body and "cache_salt" not in body and body["seed"] == 3
            assert ignored == "slo,cache_salt"
        elif spoken.kind == "anthropic":
            assert path == "/v1/messages" and body["max_tokens"] == 1024
            assert engine.headers[0]["anthropic-version"] == "2023-06-01"
            assert ignored == "cache_salt,seed"
        else:
            assert path == CHAT and ignored == ""


FAULTS = ("cut", "end", "stall", "garbage", "error event")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("said", [False, True])
async def test_a_stream_that_breaks(spoken: Spoken, fault: str, said: bool) -> None:
    """Before its first word another engine begins anew; later the error is told, and no stop."""
    head = tuple(spoken.events[: spoken.to_second_word if said else 1])
    then = fault if fault in ("cut", "end", "stall") else "end"
    tail = {"garbage": (b"data: {oops\n\n",), "error event": (spoken.error,)}.get(fault, ())
    breaks = Step(parts=(*head, *tail), then=then)
    async with (
        scripted(breaks) as one,
        scripted(Step(parts=tuple(spoken.events))) as two,
        gateway_over(config(spoken, one, two, stall_timeout=0.2, first_byte_timeout=0.2)) as (
            gateway,
            http,
        ),
    ):
        prefer_others(gateway, "e2")
        told = streamed(await http.post(CHAT, json=chat(stream=True)))
        assert told[-1] == "[DONE]" and len(one.bodies) == 1
        if said:
            assert text_of(told) == WORDS[0] and not two.bodies
            assert told[-2]["error"]["code"] == "engine_failed"
            reasons = [c.get("finish_reason") for t in told[:-2] for c in t.get("choices", ())]
            assert not any(reasons)
        else:
            assert text_of(told) == "".join(WORDS) and len(two.bodies) == 1


async def test_a_missing_end_behind_the_reason_is_no_fault(spoken: Spoken) -> None:
    """[DONE] or message_stop, and the counts before it."""
    short = spoken.events[:-1] if spoken.kind == "anthropic" else spoken.events[:-2]
    async with (
        scripted(Step(parts=tuple(short), then="cut")) as engine,
        gateway_over(config(spoken, engine)) as (_, http),
    ):
        told = streamed(await http.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "".join(WORDS) and told[-1] == "[DONE]"
        assert not any("error" in chunk for chunk in told[:-1])


async def test_cut_at_every_event(spoken: Spoken) -> None:
    """Whatever came, the caller reads either all of it or an error, and text once."""
    async with scripted(Step()) as engine, gateway_over(config(spoken, engine)) as (gateway, http):
        for cut in range(len(spoken.events)):
            gateway.upstreams.by_name["e1"].standings.clear()
            engine.script[:] = [Step(parts=tuple(spoken.events[:cut]), then="cut")]
            answer = await http.post(CHAT, json=chat(stream=True))
            if answer.status_code != 200:
                assert answer.status_code == 503
                continue
            told = streamed(answer)
            whole = "".join(WORDS)
            broken = any("error" in chunk for chunk in told[:-1])
            assert whole.startswith(text_of(told)) and (broken or text_of(told) == whole)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("how", ["seconds", "date", "milliseconds"])
async def test_a_pause_in_every_way_it_is_written(spoken: Spoken, status: int, how: str) -> None:
    import time

    header = {
        "seconds": ("retry-after", "20"),
        "date": ("retry-after", formatdate(time.time() + 20, usegmt=True)),
        "milliseconds": ("retry-after-ms", "20000"),
    }[how]
    refuses = Step(status=status, headers=(header,), parts=(b"{}",), stream=False)
    async with (
        scripted(refuses) as one,
        scripted(Step(parts=tuple(spoken.events))) as two,
        gateway_over(config(spoken, one, two)) as (gateway, http),
    ):
        prefer_others(gateway, "e2")
        for _ in range(3):
            answer = await http.post(CHAT, json=chat(stream=True))
            assert text_of(streamed(answer)) == "".join(WORDS)
        assert len(one.bodies) == 1
        assert 15 < gateway.upstreams.by_name["e1"].cooldown_left(gateway.now()) <= 20


async def test_a_caller_who_hangs_up_ends_it(spoken: Spoken) -> None:
    stalls = Step(parts=tuple(spoken.events[: spoken.to_second_word]), then="stall")
    async with scripted(stalls) as engine, gateway_over(config(spoken, engine)) as (_, http):
        sent = asyncio.ensure_future(http.post(CHAT, json=chat(stream=True)))
        await until(lambda: bool(engine.bodies))
        sent.cancel()
        await until(lambda: engine.hung_up == 1)


async def test_anthropics_errors_are_openais_to_a_caller_of_chat() -> None:
    spoken = SPOKEN["anthropic"]
    for status, kind in ANTHROPIC_ERRORS.items():
        said = {"type": "error", "error": {"type": kind, "message": "why"}}
        step = Step(status=status, parts=(json.dumps(said).encode(),), stream=False)
        async with scripted(step) as engine, gateway_over(config(spoken, engine)) as (_, http):
            client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )
            await client.close()
            # keys are the gateway's trouble, and 529 is known to no other server
            wanted = {401: 502, 403: 502, 529: 503}.get(status, status)
            assert caught.value.status_code == wanted
            if wanted == status:
                assert caught.value.type == kind and "why" in str(caught.value)


async def test_azures_errors_keep_their_words() -> None:
    spoken = SPOKEN["azure"]
    for status, said in AZURE_ERRORS.items():
        step = Step(status=status, parts=(json.dumps(said).encode(),), stream=False)
        async with scripted(step) as engine, gateway_over(config(spoken, engine)) as (_, http):
            answer = await http.post(CHAT, json=chat())
            assert answer.status_code == (502 if status == 401 else status)
            error = answer.json()["error"]
            if status == 400:
                assert error["code"] == "content_filter"
                assert error["innererror"]["code"] == "ResponsibleAIPolicyViolation"
            elif status != 401:
                assert error["message"] == said["error"]["message"]


async def test_calls_and_whole_answers_of_anthropics() -> None:
    spoken = SPOKEN["anthropic"]
    whole = Step(parts=(json.dumps(ANTHROPIC_WHOLE).encode(),), stream=False)
    async with (
        scripted(Step(parts=ANTHROPIC_TOOL_STREAM), whole) as engine,
        gateway_over(config(spoken, engine)) as (_, http),
    ):
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
        told = streamed(await http.post(CHAT, json=chat(stream=True, tools=[tool])))
        calls = [
            call
            for chunk in told[:-1]
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        assert [call["id"] for call in calls if "id" in call] == ["toolu_1", "toolu_2"]
        answer = (await http.post(CHAT, json=chat(tools=[tool]))).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        # an answer of another API is none
        engine.script[:] = [WHOLE]
        odd = await http.post(CHAT, json=chat())
        assert odd.status_code == 503 and "not follow its API" in odd.text


async def test_callers_of_the_messages_api_go_through_as_they_are() -> None:
    spoken = SPOKEN["anthropic"]
    async with (
        scripted(Step(parts=tuple(spoken.events))) as engine,
        gateway_over(config(spoken, engine)) as (_, http),
    ):
        headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "x"}
        body = chat(stream=True, max_tokens=5)
        answer = await http.post("/v1/messages", json=body, headers=headers)
        assert answer.content == b"".join(spoken.events)
        assert engine.bodies[0]["messages"] == body["messages"]
        assert engine.headers[0]["anthropic-version"] == "2099-01-01"
        metrics = (await http.get("/metrics")).text
        assert 'paceline:gateway_requests_total{engine="e1",result="ok"} 1.0' in metrics


async def test_what_an_api_cannot_do_goes_to_an_engine_that_can() -> None:
    async with (
        scripted(Step(parts=(b'{"output": []}',), stream=False)) as near,
        scripted(WHOLE) as azure,
        scripted(WHOLE) as far,
    ):
        engines = (
            EngineConfig(name="far", url=far.url, kind="anthropic", models=("m",), cloud=True),
            EngineConfig(
                name="az", url=azure.url, kind="azure", models=("m",), api_version="2024-10-21"
            ),
            EngineConfig(name="near", url=near.url),
        )
        models = (
            ModelConfig(name="m", tiers=(("far:m",), ("az:m",), ("near:m",))),
            ModelConfig(name="clouds", tiers=(("far:m",), ("az:m",))),
        )
        async with gateway_over(GatewayConfig(engines=engines, models=models)) as (_, http):
            assert (await http.post(CHAT, json=chat(n=2))).headers["x-paceline-engine"] == "az"
            answer = await http.post("/v1/responses", json={"model": "m", "input": "hi"})
            assert answer.headers["x-paceline-engine"] == "near"
            nowhere = await http.post("/v1/responses", json={"model": "clouds", "input": "hi"})
            assert nowhere.status_code == 400
            assert "Anthropic's API has no /v1/responses" in nowhere.text
            bad = chat(model="clouds", n=1, messages=[{"role": "nobody"}])
            refused = await http.post(CHAT, json=bad)
            assert refused.status_code == 400 and "role is 'nobody'" in refused.text
        assert not far.bodies and not far.paths


async def test_models_that_are_named_are_not_asked_for() -> None:
    async with (
        scripted(Step(parts=tuple(SPOKEN["azure"].events))) as engine,
        gateway_over(config(SPOKEN["azure"], engine)) as (_, http),
    ):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["m"]
        named = configured(engine, engine_fields={"e1": {"models": ("a", "b")}})
        async with gateway_over(named) as (_, other):
            listed = (await other.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["a", "b"]
