"""What users of other gateways complained of, each a test of that number that it does not happen
here. The numbers of issues are in docs/gateway.md."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.gateway.exchange import Exchange
from paceline.gateway.leg import Leg
from paceline.http.keys import ApiKey
from paceline.routing import Breaker, BreakerSettings
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, chat, configured, gateway_over, streamed, text_of
from tests.gateway.test_gateway import (
    GOOD,
    WHOLE,
    WORDS,
    _prefer_others,
    _until,
    pieces,
    refused,
)

pytestmark = pytest.mark.anyio

VLLM = (
    "vllm:num_requests_waiting 0.0\nvllm:num_requests_running 0.0\n"
    "vllm:kv_cache_usage_perc 0.9\nvllm:num_preemptions_total 0.0\n"
)
# a fault, and whether the request is a stream
FAULTS = {
    "refused": refused(503),
    "cut before the head": Step(raw=b""),
    "garbage": Step(raw=b"garbage\r\n\r\n"),
    "role alone": pieces(0),
    "cut in the middle": pieces(2),
    "an end in the middle": pieces(2, then="end"),
    "an error event": Step(parts=(*chat_chunks(WORDS)[:3], b'data: {"error": {"m": 1}}\n\n')),
    "half a chunk": Step(
        raw=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        b"transfer-encoding: chunked\r\n\r\n40\r\ndata: {"
    ),
}


def is_clean(gateway: Any) -> bool:
    """Nothing is counted as under way."""
    engines = gateway.engines.by_name.values()
    return gateway.in_flight == 0 and all(
        not e.running and not e.load.running and abs(e.load.prefill_tokens) < 1e-6 for e in engines
    )


async def test_01_counters_do_not_leak_when_callers_hang_up_or_time_runs_out() -> None:
    ann = ApiKey.of("ann", "user", "secret-ann")
    headers = {"authorization": "Bearer secret-ann"}
    slow = replace(WHOLE, delay=0.6)
    stalls = pieces(2, then="stall")
    async with (
        scripted(slow) as one,
        scripted(slow) as two,
        gateway_over(
            configured(one, two, max_concurrent_per_key=4, first_byte_timeout=0.4), (ann,)
        ) as (gateway, client),
    ):
        for number in range(8):
            one.script[:] = two.script[:] = [slow if number % 2 else stalls]
            sent = [
                asyncio.ensure_future(
                    client.post(CHAT, json=chat(stream=number % 2 == 0), headers=headers)
                )
                for _ in range(3)
            ]
            before = len(one.bodies) + len(two.bodies)
            await _until(lambda: len(one.bodies) + len(two.bodies) > before)  # noqa: B023
            for each in sent:
                each.cancel()
            await _until(lambda: is_clean(gateway))
        # and where it is the gateway that gives up
        assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 503
        await _until(lambda: is_clean(gateway))
        one.script[:] = two.script[:] = [WHOLE]
        del one.bodies[:], two.bodies[:]
        for engine in gateway.engines.by_name.values():
            engine.breaker = Breaker()
        for _ in range(30):
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        assert min(len(one.bodies), len(two.bodies)) >= 5


async def test_02_a_metric_that_was_renamed_is_unknown_and_not_zero() -> None:
    async with (
        scripted(WHOLE, metrics=VLLM) as engine,
        gateway_over(configured(engine)) as (
            gateway,
            client,
        ),
    ):
        state = gateway.engines.by_name["e1"]
        assert state.load.pressure is not None and state.load.pressure.kv == 0.9
        engine.metrics = VLLM.replace("kv_cache_usage_perc", "renamed_again")
        await _until(lambda: state.load.pressure.kv is None)
        told = (await client.get("/status")).json()["engines"]["e1"]
        assert told["pressure"]["kv"] is None and told["lost_signals"] == ["kv"]
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_kv_cache_usage{engine="e1"} NaN' in metrics


async def test_03_an_engine_that_hangs_holds_nobody_for_ever() -> None:
    never = replace(WHOLE, delay=60.0)
    async with (
        scripted(never) as hangs,
        gateway_over(configured(hangs, first_byte_timeout=0.5, max_attempts=1)) as (
            gateway,
            client,
        ),
    ):
        began = time.monotonic()
        sent = [client.post(CHAT, json=chat(stream=n % 2 == 0)) for n in range(100)]
        answers = await asyncio.gather(*sent)
        assert {answer.status_code for answer in answers} == {503}
        assert "no part of the answer for 0.5 s" in answers[0].text
        assert time.monotonic() - began < 10.0 and is_clean(gateway)
        # the gateway itself is well
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize("name", FAULTS)
async def test_04_attempts_do_not_multiply(name: str) -> None:
    """Over engines, tiers, retries and resumes together: three."""
    model = ModelConfig(name="m", tiers=(("e1:m", "e2:m"), ("e3:m", "e4:m"), ("e5:m",)))
    for stream in (True, False):
        step = FAULTS[name]
        async with (
            scripted(step, metrics=PACELINE_METRICS) as a,
            scripted(step, metrics=PACELINE_METRICS) as b,
            scripted(step, metrics=PACELINE_METRICS) as c,
            scripted(step, metrics=PACELINE_METRICS) as d,
            scripted(step, metrics=PACELINE_METRICS) as e,
            gateway_over(configured(a, b, c, d, e, models=(model,), max_resumes=9)) as (_, client),
        ):
            await client.post(CHAT, json=chat(stream=stream))
            assert 1 <= sum(len(engine.bodies) for engine in (a, b, c, d, e)) <= 3


async def test_04_a_clients_own_retries_are_paid_from_the_same_budget() -> None:
    """Its library tries again twice: what it sends then is no new work that pays for attempts."""
    async with (
        scripted(refused(429)) as one,
        scripted(refused(429)) as two,
        gateway_over(configured(one, two, retry_share=1.5, retries_per_second=0.0)) as (_, client),
    ):
        for count, sent in (("0", 2), ("1", 3), ("2", 4), ("0", 6)):
            await client.post(CHAT, json=chat(), headers={"x-stainless-retry-count": count})
            assert len(one.bodies) + len(two.bodies) == sent


async def test_05_a_pause_is_not_shortened_by_what_comes_later() -> None:
    async with (
        scripted(refused(429, retry_after="30"), refused(429, retry_after="1")) as engine,
        scripted(WHOLE) as other,
        gateway_over(configured(engine, other)) as (gateway, client),
    ):
        _prefer_others(gateway, "e2")
        both = [client.post(CHAT, json=chat()) for _ in range(2)]
        await asyncio.gather(*both)
        state = gateway.engines.by_name["e1"]
        assert len(engine.bodies) == 2 and state.rests_for(gateway.now()) > 25.0
        told = (await client.get("/status")).json()["engines"]["e1"]["trouble"]
        assert told.startswith("asked for a pause")
    breaker = Breaker(BreakerSettings(max_failures=1, open_seconds=10.0))
    breaker.fail(0.0)
    breaker.fail(8.0)
    assert breaker.reopens_in(8.0) == pytest.approx(2.0)


async def test_06_all_are_paused_and_one_is_free_in_a_moment() -> None:
    async with (
        scripted(refused(429, retry_after="0.4"), WHOLE) as one,
        scripted(refused(429, retry_after="60"), WHOLE) as two,
        gateway_over(configured(one, two)) as (_, client),
    ):
        assert (await client.post(CHAT, json=chat())).status_code == 429
        began = time.monotonic()
        answer = await client.post(CHAT, json=chat())
        # it waited for the first one instead of failing
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e1"
        assert time.monotonic() - began > 0.2 and len(two.bodies) == 1
    async with (
        scripted(refused(429, retry_after="60")) as one,
        gateway_over(configured(one)) as (_, client),
    ):
        assert (await client.post(CHAT, json=chat())).status_code == 429
        began = time.monotonic()
        late = await client.post(CHAT, json=chat())
        assert late.status_code == 429 and 50 < int(late.headers["retry-after"]) <= 60
        assert time.monotonic() - began < 2.0 and len(one.bodies) == 1


async def test_06_a_request_that_waits_may_leave() -> None:
    async with (
        scripted(refused(429, retry_after="3"), WHOLE) as one,
        gateway_over(configured(one)) as (gateway, client),
    ):
        await client.post(CHAT, json=chat())
        waits = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await _until(lambda: gateway.in_flight == 1)
        waits.cancel()
        await _until(lambda: is_clean(gateway))
        assert len(one.bodies) == 1


_EVENTS = {
    CHAT: chat_chunks(WORDS, ids=False)[:3],
    "/v1/completions": (b'data: {"id":"x","choices":[{"index":0,"text":"Once"}]}\n\n',),
    "/v1/messages": (
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
    ),
    "/v1/responses": (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
    ),
}


@pytest.mark.parametrize("path", _EVENTS)
async def test_07_a_death_in_the_middle_is_no_success_in_any_api(path: str) -> None:
    dies = Step(parts=_EVENTS[path], then="cut")
    async with scripted(dies) as one, gateway_over(configured(one)) as (_, client):
        answer = await client.post(path, json={"model": "m", "stream": True, "prompt": "x"})
        assert "error" in answer.text.rpartition("\n\ndata: [DONE]")[0] or "error" in answer.text
        assert '"finish_reason":"stop"' not in answer.text and "message_stop" not in answer.text
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_requests_total{engine="e1",result="broken"} 1.0' in metrics
        assert 'result="ok"' not in metrics


@pytest.mark.parametrize("path", _EVENTS)
async def test_07_what_the_caller_forbids_is_not_done_in_any_api(path: str) -> None:
    model = ModelConfig(name="m", tiers=(("e1:m",), ("e2:m",)))
    async with (
        scripted(refused(503)) as one,
        scripted(WHOLE) as two,
        gateway_over(configured(one, two, models=(model,))) as (_, client),
    ):
        body = {"model": "m", "prompt": "x"}
        for allowed in ("retry, resume", "fallback, resume", ""):
            headers = {"x-paceline-allow": allowed}
            assert (await client.post(path, json=body, headers=headers)).status_code == 503
        assert not two.bodies
        assert (await client.post(path, json=body)).status_code == 200


async def test_07_a_resume_that_is_forbidden_is_an_error() -> None:
    async with (
        scripted(pieces(2), metrics=PACELINE_METRICS) as dies,
        scripted(GOOD, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(dies, lives)) as (gateway, client),
    ):
        _prefer_others(gateway, "e2")
        headers = {"x-paceline-allow": "retry, fallback"}
        told = streamed(await client.post(CHAT, json=chat(stream=True), headers=headers))
        assert told[-2]["error"]["code"] == "engine_lost" and not lives.bodies


@pytest.mark.parametrize("cut", [0, 1, 2])
async def test_08_nothing_is_said_twice_and_no_space_is_lost_at_the_seam(cut: int) -> None:
    """Behind text: an empty beginning begins anew, a space at its end is sent as it is."""
    words = ("Once ", "upon  ", "a", " time")
    dies = Step(parts=chat_chunks(words, ids=False)[: cut + 1], then="cut")
    rest = Step(parts=chat_chunks(words[cut:], ids=False, created=2))
    async with (
        scripted(dies, metrics=VLLM) as one,
        scripted(rest, metrics=VLLM) as two,
        gateway_over(configured(one, two, resume_by_text=True)) as (gateway, client),
    ):
        _prefer_others(gateway, "e2")
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
        async with scripted(step) as one, gateway_over(configured(one)) as (_, client):
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
            await _until(lambda: is_clean(gateway))
            one.script[:] = [WHOLE]
            answer = await client.post(CHAT, json=chat(max_tokens=10), headers=headers)
            left = int(answer.headers["x-ratelimit-remaining-tokens"])
            prompt = round(len(json.dumps(body["messages"], separators=(",", ":"))) / 4)
            # three tokens of the first, and what the second has reserved when its head is sent
            assert left == 1000 - prompt - 3 - prompt - 10


@pytest.mark.parametrize("stream", [True, False])
async def test_10_an_engine_stops_when_the_caller_is_gone(stream: bool) -> None:
    step = replace(pieces(2, then="stall"), stream=stream)
    async with scripted(step) as one, gateway_over(configured(one)) as (gateway, client):
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(stream=stream)))
        await _until(lambda: bool(one.bodies))
        sent.cancel()
        await _until(lambda: one.hung_up == 1, 2.0)
        await _until(lambda: is_clean(gateway))


async def test_11_a_long_wait_is_kept_alive_and_statuses_stay_honest() -> None:
    async with (
        scripted(replace(GOOD, delay=0.7), refused(400)) as one,
        gateway_over(configured(one, sse_keep_alive=0.2)) as (_, client),
    ):
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            first = await answer.aiter_raw().__anext__()
            assert first.startswith(b":") and answer.status_code == 200
        # what is refused before the first comment has its status
        assert (await client.post(CHAT, json=chat(stream=True))).status_code == 400
        # and behind it an event that says the same
        one.script[:] = [replace(refused(400), delay=0.6)]
        late = await client.post(CHAT, json=chat(stream=True))
        assert late.status_code == 200
        told = streamed(late)
        assert "refused it (400)" in told[0]["error"]["message"] and told[-1] == "[DONE]"


async def test_11_comments_also_come_while_a_request_waits_for_its_turn() -> None:
    one = {"e1": {"max_concurrent": 1}}
    async with (
        scripted(replace(WHOLE, delay=0.8), GOOD) as engine,
        gateway_over(configured(engine, engine_fields=one, sse_keep_alive=0.2)) as (_, client),
    ):
        first = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await _until(lambda: bool(engine.bodies))
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
        assert gateway.engines.by_name["e1"].breaker.num_opened == 0
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
    async with (
        scripted(too_long) as short,
        scripted(WHOLE) as long,
        gateway_over(configured(short, long, models=models)) as (_, client),
    ):
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


@contextlib.asynccontextmanager
async def odd_redis(says: bytes | None) -> AsyncIterator[int]:
    """A port: of a Redis that says this to all but a ping; None: it says nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                if says is not None:
                    # commands of a pipeline are arrays, each beginning with its length
                    count = max(1, len(re.findall(rb"(?m)^\*\d", data)))
                    writer.write((b"+PONG" if b"PING" in data else says) * count + b"\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    "says",
    [
        None,
        b"-NOPERM this user has no permissions to run the 'evalsha' command",
        b"-CROSSSLOT Keys in request don't hash to the same slot",
    ],
)
async def test_13_a_redis_that_does_not_count_is_neither_an_outage_nor_no_limit(
    says: bytes | None,
) -> None:
    ann = ApiKey.of("ann", "user", "secret-ann")
    headers = {"authorization": "Bearer secret-ann"}
    async with (
        odd_redis(says) as port,
        scripted(WHOLE) as one,
        gateway_over(
            configured(
                one,
                rate_limit_requests="5/300day",
                rate_limit_storage=f"redis://127.0.0.1:{port}/0",
            ),
            (ann,),
        ) as (_, client),
    ):
        began = time.monotonic()
        statuses = []
        for number in range(14):
            statuses.append((await client.post(CHAT, json=chat(), headers=headers)).status_code)
            if number == 6:
                # a probe a second must not find it well, and count anew from zero
                await asyncio.sleep(1.3)
        assert statuses == [200] * 5 + [429] * 9
        assert time.monotonic() - began < 1.3 + 3.0


async def test_14_a_budget_of_tokens_is_neither_overrun_at_once_nor_charged_twice() -> None:
    ann = ApiKey.of("ann", "user", "secret-ann")
    headers = {"authorization": "Bearer secret-ann"}
    counted = Step(
        parts=(b'{"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":10}}',),
        stream=False,
        delay=0.05,
    )
    async with (
        scripted(refused(503)) as one,
        scripted(counted) as two,
        gateway_over(configured(one, two, rate_limit_tokens="300/300day"), (ann,)) as (_, client),
    ):
        # each reserves 8 and 100: of ten at once no more than two fit
        sent = [client.post(CHAT, json=chat(max_tokens=100), headers=headers) for _ in range(10)]
        statuses = [answer.status_code for answer in await asyncio.gather(*sent)]
        assert statuses.count(200) == 2 and statuses.count(429) == 8
        # and each is charged once, wherever it was tried
        answer = await client.post(CHAT, json=chat(max_tokens=10), headers=headers)
        assert answer.status_code == 200
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left == 300 - 2 * (8 + 10) - (8 + 10)


async def test_15_memory_does_not_grow_with_what_callers_send() -> None:
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one)) as (gateway, client),
    ):
        state = gateway.engines.by_name["e1"]
        state.load.prefixes._memory = 50

        async def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"{number} " * 300}]
            headers = {"x-request-id": f"r{number}", "x-llm-d-inference-fairness-id": f"t{number}"}
            body = chat(messages=messages, user=f"u{number}", cache_salt=f"s{number}")
            assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
            assert (await client.post(CHAT, json=chat(model=f"m{number}"))).status_code == 404

        for number in range(5):
            await ask(number)
        series = (await client.get("/metrics")).text.count("\n")
        for number in range(5, 60):
            await ask(number)
        assert len(state.load.prefixes) <= 50
        assert (await client.get("/metrics")).text.count("\n") == series
        assert set(gateway._mean_output) <= {"m"} and not gateway.turns._queues
        gc.collect()
        # by type: objects of other packages warn where they are asked for anything
        alive = [each for each in gc.get_objects() if type(each) in (Exchange, Leg)]
        # httpx may hold on to the last one's connection
        assert len(alive) <= 4


async def test_16_a_burst_is_spread() -> None:
    async with (
        scripted(replace(WHOLE, delay=0.3), metrics=PACELINE_METRICS) as one,
        scripted(replace(WHOLE, delay=0.3), metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, poll_interval=5.0)) as (_, client),
    ):
        await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(20)))
        assert 8 <= len(one.bodies) <= 12


async def test_16_a_broken_engine_that_is_empty_attracts_nothing() -> None:
    async with (
        scripted(refused(500)) as broken,
        scripted(replace(WHOLE, delay=0.02)) as good,
        gateway_over(configured(broken, good)) as (gateway, client),
    ):
        for _ in range(40):
            assert (await client.post(CHAT, json=chat())).status_code == 200
        # until its breaker opens
        assert len(broken.bodies) <= 5 and len(good.bodies) == 40
        assert gateway.engines.by_name["e1"].breaker.num_opened == 1


async def test_16_a_whole_conversation_counts_and_not_its_first_message() -> None:
    system = {"role": "system", "content": "You are helpful. " * 40}
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as one,
        scripted(WHOLE, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two)) as (gateway, client),
    ):
        turns = [{"role": "user", "content": f"{name} " * 400} for name in "ab"]
        _prefer_others(gateway, "e2")
        await client.post(CHAT, json=chat(messages=[system, turns[0]]))
        gateway.engines.by_name["e2"].load.prefill_tokens -= 1e6
        _prefer_others(gateway, "e1")
        await client.post(CHAT, json=chat(messages=[system, turns[1]]))
        gateway.engines.by_name["e1"].load.prefill_tokens -= 1e6
        assert (len(one.bodies), len(two.bodies)) == (1, 1)
        more = {"role": "user", "content": "and then?"}
        for turn, engine in ((turns[1], "e2"), (turns[0], "e1"), (turns[1], "e2")):
            answer = await client.post(CHAT, json=chat(messages=[system, turn, more]))
            assert answer.headers["x-paceline-engine"] == engine


async def test_17_a_breaker_that_is_half_open_lets_one_through() -> None:
    dead = refused(500)
    async with (
        scripted(dead) as one,
        scripted(replace(WHOLE, delay=0.05)) as two,
        gateway_over(configured(one, two)) as (gateway, client),
    ):
        state = gateway.engines.by_name["e1"]
        state.breaker = Breaker(BreakerSettings(max_failures=1, open_seconds=0.3))
        _prefer_others(gateway, "e2")
        await client.post(CHAT, json=chat())
        assert state.breaker.state(gateway.now()) == "open" and len(one.bodies) == 1
        one.script[:] = [replace(WHOLE, delay=0.3)]
        await asyncio.sleep(0.35)
        answers = await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        # one of ten, and time alone does not close it: two successes do
        assert len(one.bodies) == 2 and state.breaker.state(gateway.now()) == "half-open"
        await client.post(CHAT, json=chat())
        assert state.breaker.state(gateway.now()) == "closed"


async def test_18_no_first_token_waits_for_a_fixed_time_under_many_connections() -> None:
    async with (
        scripted(replace(WHOLE, delay=0.01)) as one,
        gateway_over(configured(one)) as (gateway, client),
    ):
        seconds: list[float] = []

        async def ask() -> None:
            for number in range(4):
                began = time.monotonic()
                # connections that the engine closes behind an answer among those that stay open
                closes = {"connection": "close"} if number % 2 else {}
                assert (await client.post(CHAT, json=chat(), headers=closes)).status_code == 200
                seconds.append(time.monotonic() - began)

        await asyncio.gather(*(ask() for _ in range(80)))
        assert max(seconds) < 4.0 and len(gateway.engines.by_name["e1"].pool) <= 82


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
    async with scripted(step) as one, gateway_over(configured(one)) as (_, client):
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert told == [*sent, "[DONE]"]
        # cut before the finish reason it is no whole call
        one.script[:] = [Step(parts=(*parts[:-1], b"data: [DONE]\n\n"))]
        cut = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert "error" in cut[-2]


@pytest.mark.parametrize(
    "frame",
    [
        # no length, no chunks: the end of the connection is all there is
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99999\r\n\r\n%b",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%%x\r\n%b\r\n",
    ],
)
async def test_20_an_end_of_file_is_no_stop(frame: bytes) -> None:
    said = b"".join(chat_chunks(WORDS, ids=False)[:3])
    raw = (frame % said).replace(b"%x", b"%x" % len(said))
    async with scripted(Step(raw=raw)) as one, gateway_over(configured(one)) as (_, client):
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "Once upon" and told[-2]["error"]["code"] == "engine_lost"
        assert not any(c.get("finish_reason") for t in told[:-2] for c in t.get("choices", ()))
    # an answer that is not streamed and half there is none at all
    half = Step(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + b'{"choices":[{"te')
    async with (
        scripted(half) as one,
        scripted(WHOLE) as two,
        gateway_over(configured(one, two)) as (gateway, client),
    ):
        _prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
