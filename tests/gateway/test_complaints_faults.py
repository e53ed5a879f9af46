"""What users of other gateways complained of where engines fail and callers leave, each a test of
that number that it does not happen here. The numbers of issues are in docs/operate/gateway.md."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from paceline.gateway import ModelConfig
from paceline.http.keys import ApiKey
from paceline.routing import Breaker, BreakerSettings
from paceline.routing.latency import LatencyModel
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
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
            await until(lambda: len(one.bodies) + len(two.bodies) > before)  # noqa: B023
            for each in sent:
                each.cancel()
            await until(lambda: is_clean(gateway))
        # and where it is the gateway that gives up
        assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 503
        await until(lambda: is_clean(gateway))
        one.script[:] = two.script[:] = [WHOLE]
        del one.bodies[:], two.bodies[:]
        for engine in gateway.upstreams.by_name.values():
            engine.standings.clear()
            # short answers go to the one that was a little faster so far
            engine.load.latency = LatencyModel()
        for _ in range(30):
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        assert min(len(one.bodies), len(two.bodies)) >= 5


async def test_03_an_engine_that_hangs_holds_no_caller_for_ever() -> None:
    never = replace(WHOLE, delay=60.0)
    async with serving(never, first_byte_timeout=0.3, max_attempts=1) as (_, gateway, client):
        began = time.monotonic()
        sent = [client.post(CHAT, json=chat(stream=n % 2 == 0)) for n in range(100)]
        answers = await asyncio.gather(*sent)
        assert {answer.status_code for answer in answers} == {503}
        assert "no part of the answer for 0.3 s" in answers[0].text
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
            # a connection that was used before, and closes without a byte, is no attempt
            most = 6 if name == "cut before the head" else 3
            assert 1 <= sum(len(engine.bodies) for engine in (a, b, c, d, e)) <= most


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
        prefer_others(gateway, "e2")
        both = [client.post(CHAT, json=chat()) for _ in range(2)]
        await asyncio.gather(*both)
        state = gateway.upstreams.by_name["e1"]
        assert len(engine.bodies) == 2 and state.cooldown_left(gateway.now()) > 25.0
        told = (await client.get("/status")).json()["engines"]["e1"]["trouble"]
        assert told.startswith("requested a cooldown")
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
    async with serving(refused(429, retry_after="60")) as (one, _, client):
        assert (await client.post(CHAT, json=chat())).status_code == 429
        began = time.monotonic()
        late = await client.post(CHAT, json=chat())
        assert late.status_code == 429 and 50 < int(late.headers["retry-after"]) <= 60
        assert time.monotonic() - began < 2.0 and len(one.bodies) == 1


async def test_06_a_request_that_waits_may_leave() -> None:
    async with serving((refused(429, retry_after="3"), WHOLE)) as (one, gateway, client):
        await client.post(CHAT, json=chat())
        waits = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: gateway.in_flight == 1)
        waits.cancel()
        await until(lambda: is_clean(gateway))
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
    async with serving(dies) as (_, _, client):
        answer = await client.post(path, json={"model": "m", "stream": True, "prompt": "x"})
        assert "error" in answer.text.rpartition("\n\ndata: [DONE]")[0] or "error" in answer.text
        assert '"finish_reason":"stop"' not in answer.text and "message_stop" not in answer.text
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_requests_total{engine="e1",result="broken"} 1.0' in metrics
        assert 'result="ok"' not in metrics


# an answer of each API
_WHOLE = b'{"choices": [], "content": [], "output": []}'


@pytest.mark.parametrize("path", _EVENTS)
async def test_07_what_the_caller_forbids_is_not_done_in_any_api(path: str) -> None:
    model = ModelConfig(name="m", tiers=(("e1:m",), ("e2:m",)))
    async with (
        scripted(refused(503)) as one,
        scripted(Step(parts=(_WHOLE,), stream=False)) as two,
        gateway_over(configured(one, two, models=(model,))) as (_, client),
    ):
        body = {"model": "m", "prompt": "x"}
        for allowed in ("retry, resume", "fallback, resume", ""):
            headers = {"x-paceline-allow": allowed}
            assert (await client.post(path, json=body, headers=headers)).status_code == 503
        assert not two.bodies
        assert (await client.post(path, json=body)).status_code == 200


async def test_07_a_resume_that_is_forbidden_is_an_error() -> None:
    async with serving(pieces(2), GOOD, metrics=PACELINE_METRICS) as (_, lives, gateway, client):
        prefer_others(gateway, "e2")
        headers = {"x-paceline-allow": "retry, fallback"}
        told = streamed(await client.post(CHAT, json=chat(stream=True), headers=headers))
        assert told[-2]["error"]["code"] == "engine_failed" and not lives.bodies


@pytest.mark.parametrize("stream", [True, False])
async def test_10_an_engine_stops_when_the_caller_is_gone(stream: bool) -> None:
    step = replace(pieces(2, then="stall"), stream=stream)
    async with serving(step) as (one, gateway, client):
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(stream=stream)))
        await until(lambda: bool(one.bodies))
        sent.cancel()
        await until(lambda: one.hung_up == 1, 2.0)
        await until(lambda: is_clean(gateway))


async def test_17_a_breaker_that_is_half_open_lets_one_through() -> None:
    dead = refused(500)
    async with serving(dead, replace(WHOLE, delay=0.05)) as (one, _, gateway, client):
        state = gateway.upstreams.by_name["e1"].standings.of("m", gateway.now())
        state.breaker = Breaker(BreakerSettings(max_failures=1, open_seconds=0.15))
        prefer_others(gateway, "e2")
        await client.post(CHAT, json=chat())
        assert state.breaker.state(gateway.now()) == "open" and len(one.bodies) == 1
        one.script[:] = [replace(WHOLE, delay=0.2)]
        await asyncio.sleep(0.2)
        answers = await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        # one of ten, and time alone does not close it: two successes do
        assert len(one.bodies) == 2 and state.breaker.state(gateway.now()) == "half-open"
        await client.post(CHAT, json=chat())
        assert state.breaker.state(gateway.now()) == "closed"


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
    async with serving(Step(raw=raw)) as (_, _, client):
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "Once upon" and told[-2]["error"]["code"] == "engine_failed"
        assert not any(c.get("finish_reason") for t in told[:-2] for c in t.get("choices", ()))
    # an answer that is not streamed and half there is none at all
    half = Step(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + b'{"choices":[{"te')
    async with serving(half, WHOLE) as (_, _, gateway, client):
        prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
