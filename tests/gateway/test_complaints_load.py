"""What users of other gateways complained of under load and over time, each a test of that number
that it does not happen here. The numbers of issues are in docs/operate/gateway.md."""

import asyncio
import contextlib
import functools
import gc
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from paceline.gateway import app as app_module
from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.proxied_request import ProxiedRequest
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.store import RateStore
from tests.gateway.fault_server import PACELINE_METRICS, Step, scripted
from tests.gateway.helpers import (
    CHAT,
    VLLM,
    WHOLE,
    chat,
    configured,
    gateway_over,
    prefer_others,
    refused,
    serving,
    until,
)


async def test_02_a_metric_that_was_renamed_is_unknown_and_not_zero() -> None:
    async with serving(WHOLE, metrics=VLLM) as (engine, gateway, client):
        state = gateway.upstreams.by_name["e1"]
        assert state.load.pressure is not None and state.load.pressure.kv == 0.9
        engine.metrics = VLLM.replace("kv_cache_usage_perc", "renamed_again")
        await until(lambda: state.load.pressure.kv is None)
        told = (await client.get("/status")).json()["engines"]["e1"]
        assert told["pressure"]["kv"] is None and told["lost_signals"] == ["kv"]
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_kv_cache_usage{engine="e1"} NaN' in metrics


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
    says: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = functools.partial(RateStore, probe_every=0.1)
    monkeypatch.setattr(app_module, "RateStore", store)
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
                # a probe or two must not find it well, and count anew from zero
                await asyncio.sleep(0.5)
        assert statuses == [200] * 5 + [429] * 9
        assert time.monotonic() - began < 0.5 + 3.0


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
        assert left == 300 - 3 * (3 + 10)


async def test_15_memory_does_not_grow_with_what_callers_send() -> None:
    async with serving(WHOLE, metrics=PACELINE_METRICS) as (_, gateway, client):
        state = gateway.upstreams.by_name["e1"]
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
        assert not gateway.flow_control._queues
        for kept in (gateway._lengths.models, gateway._bytes_per_token.models):
            assert kept <= {"m"}
        gc.collect()
        # by type: objects of other packages warn where they are asked for anything
        alive = [each for each in gc.get_objects() if type(each) in (ProxiedRequest, Attempt)]
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
    async with serving(refused(500), replace(WHOLE, delay=0.02)) as (broken, good, gateway, client):
        for _ in range(40):
            assert (await client.post(CHAT, json=chat())).status_code == 200
        # until its breaker opens
        assert len(broken.bodies) <= 5 and len(good.bodies) == 40
        assert gateway.upstreams.by_name["e1"].num_opened == 1


async def test_16_a_whole_conversation_counts_and_not_its_first_message() -> None:
    system = {"role": "system", "content": "You are helpful. " * 40}
    async with serving(WHOLE, WHOLE, metrics=PACELINE_METRICS) as (one, two, gateway, client):
        turns = [{"role": "user", "content": f"{name} " * 400} for name in "ab"]
        prefer_others(gateway, "e2")
        await client.post(CHAT, json=chat(messages=[system, turns[0]]))
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        prefer_others(gateway, "e1")
        await client.post(CHAT, json=chat(messages=[system, turns[1]]))
        gateway.upstreams.by_name["e1"].load.prefill_tokens -= 1e6
        assert (len(one.bodies), len(two.bodies)) == (1, 1)
        more = {"role": "user", "content": "and then?"}
        for turn, engine in ((turns[1], "e2"), (turns[0], "e1"), (turns[1], "e2")):
            answer = await client.post(CHAT, json=chat(messages=[system, turn, more]))
            assert answer.headers["x-paceline-engine"] == engine


async def test_18_no_first_token_waits_for_a_fixed_time_under_many_connections() -> None:
    async with serving(replace(WHOLE, delay=0.01)) as (_, gateway, client):
        seconds: list[float] = []

        async def ask() -> None:
            for number in range(4):
                began = time.monotonic()
                # connections that the engine closes behind an answer among those that stay open
                closes = {"connection": "close"} if number % 2 else {}
                assert (await client.post(CHAT, json=chat(), headers=closes)).status_code == 200
                seconds.append(time.monotonic() - began)

        await asyncio.gather(*(ask() for _ in range(80)))
        assert max(seconds) < 4.0 and len(gateway.upstreams.by_name["e1"].pool) <= 82
