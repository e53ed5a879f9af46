"""What users of other gateways complained of in what they read, each a test of that number that it
does not happen here. The numbers of issues are in docs/operate/gateway.md."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    VLLM,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    pieces,
    prefer_others,
    refused,
    serving,
    streamed,
    text_of,
    until,
)


@pytest.mark.parametrize("cut", [0, 1, 2])
async def test_08_nothing_is_said_twice_and_no_space_is_lost_at_the_seam(cut: int) -> None:
    """Behind text: an empty beginning begins anew, a space at its end is sent as it is."""
    words = ("Once ", "upon  ", "a", " time")
    dies = Step(parts=chat_chunks(words, ids=False)[: cut + 1], then="cut")
    rest = Step(parts=chat_chunks(words[cut:], ids=False, created=2))
    async with serving(dies, rest, metrics=VLLM, resume_by_text=True) as (_, two, gateway, client):
        prefer_others(gateway, "e2")
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "Once upon  a time"
        (body,) = two.bodies
        if cut == 0:
            assert "continue_final_message" not in body and len(body["messages"]) == 1
        else:
            assert body["messages"][-1]["content"] == "".join(words[:cut])


async def test_09_usage_is_neither_lost_nor_doubled_nor_made_up() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True})
    head = {"id": "x", "created": 1, "model": "m"}
    end = {"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}
    counts = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "odd": 0}

    def event(**fields: Any) -> bytes:
        return b"data: " + json.dumps({**head, **fields}).encode() + b"\n\n"

    for parts, found in (
        # on the chunk that ends the choice
        ((event(choices=[end], usage=counts),), [counts]),
        # twice
        ((event(choices=[end]), *[event(choices=[], usage=counts)] * 2), [counts]),
        # of nothing: the engine does not count
        ((event(choices=[end]),), []),
    ):
        step = Step(parts=(*parts, b"data: [DONE]\n\n"))
        async with serving(step) as (_, _, client):
            told = streamed(await client.post(CHAT, json=asked))
            assert [c["usage"] for c in told[:-1] if c.get("usage")] == found


async def test_09_who_hangs_up_pays_for_what_was_made_and_no_more() -> None:
    ann = ApiKey.of("ann", "user", "secret-ann")
    headers = {"authorization": "Bearer secret-ann"}
    for ids in (True, False):
        async with (
            scripted(pieces(3, ids=ids, then="stall"), metrics=PACELINE_METRICS) as one,
            gateway_over(configured(one, rate_limit_tokens="1000/300day"), (ann,)) as (
                gateway,
                client,
            ),
        ):
            body = chat(stream=True, max_tokens=400)
            async with client.stream("POST", CHAT, json=body, headers=headers) as answer:
                got = b""
                async for data in answer.aiter_raw():
                    got += data
                    if b" a" in got:
                        break
            await until(lambda: is_clean(gateway))
            one.script[:] = [WHOLE]
            answer = await client.post(CHAT, json=chat(max_tokens=10), headers=headers)
            left = int(answer.headers["x-ratelimit-remaining-tokens"])
            prompt = round(len(json.dumps(body["messages"], separators=(",", ":"))) / 4)
            # three tokens of the first, and one of the second, whose engine does not count
            assert left == 1000 - (3 if ids else prompt) - 3 - prompt - 1


async def test_11_a_long_wait_is_kept_alive_and_statuses_stay_honest() -> None:
    async with (
        scripted(replace(GOOD, delay=0.3), refused(400)) as one,
        gateway_over(configured(one, sse_keep_alive=0.1)) as (_, client),
    ):
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            first = await answer.aiter_raw().__anext__()
            assert first.startswith(b":") and answer.status_code == 200
        # what is refused before the first comment has its status
        assert (await client.post(CHAT, json=chat(stream=True))).status_code == 400
        # and behind it an event that says the same
        one.script[:] = [replace(refused(400), delay=0.3)]
        late = await client.post(CHAT, json=chat(stream=True))
        assert late.status_code == 200
        told = streamed(late)
        assert "refused (400)" in told[0]["error"]["message"] and told[-1] == "[DONE]"


async def test_11_comments_also_come_while_a_request_waits_for_its_turn() -> None:
    one = {"e1": {"max_concurrent": 1}}
    async with (
        scripted(replace(WHOLE, delay=0.3), GOOD) as engine,
        gateway_over(configured(engine, engine_fields=one, sse_keep_alive=0.1)) as (_, client),
    ):
        first = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(engine.bodies))
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.content.startswith(b":") and text_of(streamed(answer)) == "".join(WORDS)
        assert (await first).status_code == 200


TOO_LONG = {
    "openai": {"message": "too long", "code": "context_length_exceeded"},
    "vllm": {
        "message": "This model's maximum context length is 64 tokens. However, you requested 99",
        "code": 400,
    },
    "llama.cpp": {
        "message": "request (99 tokens) exceeds the available context size (64 tokens)",
        "type": "exceed_context_size_error",
    },
    "sglang": {"message": "The input (99 tokens) is longer than the model's context length (64)."},
    "anthropic": {"message": "prompt is too long: 200001 tokens > 200000 maximum"},
}


@pytest.mark.parametrize("kind", TOO_LONG)
async def test_12_a_prompt_too_long_goes_to_a_longer_context_and_never_a_shorter(kind: str) -> None:
    body = json.dumps({"error": TOO_LONG[kind]}).encode()
    too_long = Step(status=400, parts=(body,), stream=False)
    model = ModelConfig(name="m", tiers=(("e1:m",), ("e2:m",), ("e3:m",)))
    async with (
        scripted(too_long, max_model_len=64) as short,
        scripted(WHOLE, max_model_len=32) as shorter,
        scripted(WHOLE, max_model_len=4096) as long,
        gateway_over(configured(short, shorter, long, models=(model,))) as (gateway, client),
    ):
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e3"
        assert (len(short.bodies), len(shorter.bodies), len(long.bodies)) == (1, 0, 1)
        assert gateway.upstreams.by_name["e1"].num_opened == 0
        long.script[:] = [too_long]
        nowhere = await client.post(CHAT, json=chat())
        assert nowhere.status_code == 400 and not shorter.bodies
        assert nowhere.json()["error"]["code"] == "context_length_exceeded"


async def test_12_the_model_for_long_prompts_takes_what_was_estimated_too_short() -> None:
    models = (
        ModelConfig(name="chat", tiers=(("e1:m",),), length_over={"100": "long"}),
        ModelConfig(name="long", tiers=(("e2:m",),)),
    )
    too_long = Step(
        status=400, parts=(json.dumps({"error": TOO_LONG["vllm"]}).encode(),), stream=False
    )
    async with serving(too_long, WHOLE, models=models) as (_, long, _, client):
        answer = await client.post(CHAT, json=chat(model="chat"))
        assert answer.status_code == 200 and answer.json()["model"] == "chat"
        assert answer.headers["x-paceline-fallback"] == "m"
        forbidden = await client.post(
            CHAT, json=chat(model="chat"), headers={"x-paceline-allow": "retry"}
        )
        assert forbidden.status_code == 400 and len(long.bodies) == 1


async def test_12_an_engine_that_cuts_in_silence_gets_nothing_that_is_too_long() -> None:
    loaded = {"/api/ps": {"models": [{"name": "m", "context_length": 64}]}}
    async with (
        scripted(WHOLE, pages={"/api/version": {}, **loaded}) as ollama,
        gateway_over(configured(ollama, kinds={"e1": "ollama"})) as (_, client),
    ):
        assert (await client.post(CHAT, json=chat())).status_code == 200
        words = [{"role": "user", "content": "word " * 60}]
        answer = await client.post(CHAT, json=chat(messages=words))
        assert answer.status_code == 400 and "the context has 64" in answer.text
        assert len(ollama.bodies) == 1
    slots = {"/props": {"default_generation_settings": {"n_ctx": 128}, "total_slots": 4}}
    async with (
        scripted(WHOLE, metrics="llamacpp:requests_deferred 0\n", pages=slots) as llama,
        gateway_over(configured(llama)) as (_, client),
    ):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["max_model_len"] for entry in listed] == [128]


def _tool_shapes() -> dict[str, list[dict[str, Any]]]:
    def call(index: int = 0, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **fields}]}

    first = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    parts = ['{"a', '":', ' "\\u00', 'e9\\n"', "}"]
    rest = [call(function={"arguments": part}) for part in parts]
    return {
        "ids in the first delta alone": [call(**first), *rest],
        "null where nothing is said": [
            {"content": None, **call(**first)}, *[{"content": None, **each} for each in rest],
        ],
        "empty text beside": [{"content": "", **call(**first)}, *rest],
        "two at once": [
            {"tool_calls": [{"index": 0, **first}, {"index": 1, **first, "id": "c2"}]}, *rest,
        ],
        "whole": [call(**{**first, "function": {"name": "f", "arguments": "{}"}})],
    }  # fmt: skip


@pytest.mark.parametrize("shape", _tool_shapes())
@pytest.mark.parametrize("none", [None, "", "left out"])
async def test_19_every_shape_of_a_streamed_call_goes_through(shape: str, none: str | None) -> None:
    deltas = _tool_shapes()[shape]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in deltas]
    for choice in choices:
        if none != "left out":
            choice["finish_reason"] = none
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    # some begin with an event that has no choices
    sent = [{"id": "x", "model": "m", "choices": []}]
    sent += [{"id": "x", "model": "m", "choices": [choice]} for choice in choices]
    parts = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in sent]
    step = Step(parts=(b": hello\n\n", *parts, b": bye\n\n", b"data: [DONE]\n\n"))
    async with serving(step) as (one, _, client):
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert told == [*sent, "[DONE]"]
        # cut before the finish reason it is no whole call
        one.script[:] = [Step(parts=(*parts[:-1], b"data: [DONE]\n\n"))]
        cut = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert "error" in cut[-2]
