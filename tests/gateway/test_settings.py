"""Every setting changes something: here is what."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.http.keys import ApiKey, KeyRing
from paceline.http.rate_limits.rates import Rate
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    pieces,
    prefer_others,
    refused,
    serving,
    streamed,
    text_of,
    until,
)


async def test_first_byte_timeout() -> None:
    late = replace(WHOLE, delay=3.0)
    async with serving(late, WHOLE, first_byte_timeout=0.3) as (_, _, gateway, client):
        prefer_others(gateway, "e2")
        began = time.monotonic()
        answer = await client.post(CHAT, json=chat())
        assert answer.headers["x-paceline-engine"] == "e2"
        assert time.monotonic() - began < 2.0


async def test_sse_keep_alive() -> None:
    late = replace(Step(parts=chat_chunks(WORDS)), delay=0.3)
    for seconds, comments in ((0.1, True), (0.0, False)):
        async with serving(late, sse_keep_alive=seconds) as (_, _, client):
            answer = await client.post(CHAT, json=chat(stream=True))
            assert (b": keep-alive" in answer.content) == comments
            assert text_of(streamed(answer)) == "".join(WORDS)


async def test_connect_timeout() -> None:
    """An address that takes a connection no more: its queue of them is full."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = []
    for _ in range(8):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(full.getsockname())
        waiting.append(one)
    async with scripted(WHOLE) as engine:
        port, engine.port = engine.port, full.getsockname()[1]
        config = configured(engine, connect_timeout=0.2, poll_timeout=5.0)
        engine.port = port
        began = time.monotonic()
        async with gateway_over(config) as (gateway, _):
            trouble = gateway.upstreams.by_name["e1"].trouble
        assert trouble == "no connection within 0.2 s" and time.monotonic() - began < 3.0
    for one in (*waiting, full):
        one.close()


async def test_max_cooldown_wait() -> None:
    for most, status in ((0.0, 429), (5.0, 200)):
        async with (
            scripted(refused(503, retry_after="0.3"), WHOLE) as engine,
            gateway_over(configured(engine, max_cooldown_wait=most)) as (_, client),
        ):
            assert (await client.post(CHAT, json=chat())).status_code == 503
            assert (await client.post(CHAT, json=chat())).status_code == status


async def test_max_resumes() -> None:
    for most, ends in ((0, "error"), (1, "error"), (2, "whole")):
        async with (
            scripted(pieces(1), metrics=PACELINE_METRICS) as a,
            scripted(
                Step(parts=chat_chunks(WORDS[1:], first_id=1)[:2], then="cut"),
                metrics=PACELINE_METRICS,
            ) as b,
            scripted(Step(parts=chat_chunks(WORDS[2:], first_id=2)), metrics=PACELINE_METRICS) as c,
            gateway_over(configured(a, b, c, max_resumes=most)) as (gateway, client),
        ):
            prefer_others(gateway, "e2")
            prefer_others(gateway, "e3")
            prefer_others(gateway, "e3")
            told = streamed(await client.post(CHAT, json=chat(stream=True)))
            assert ("error" if "error" in told[-2] else "whole") == ends
            assert ends == "error" or text_of(told) == "".join(WORDS)


@pytest.mark.parametrize(
    ("fields", "attempts"),
    [
        ({"retry_share": 0.0, "retries_per_second": 0.0}, 4),
        # a share of every request, so one of the four may try again
        ({"retry_share": 0.3, "retries_per_second": 0.0}, 5),
        ({"retry_share": 0.0, "retries_per_second": 5.0}, 8),
    ],
)
async def test_the_budget_of_further_attempts(fields: dict[str, float], attempts: int) -> None:
    async with serving(refused(429), refused(429), **fields) as (one, two, _, client):
        for _ in range(4):
            assert (await client.post(CHAT, json=chat())).status_code == 429
        assert len(one.bodies) + len(two.bodies) == attempts


async def test_max_concurrent_per_key() -> None:
    slow = replace(WHOLE, delay=0.3)
    async with serving(slow, max_concurrent_per_key=1) as (engine, _, client):
        first = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(engine.bodies))
        assert (await client.post(CHAT, json=chat())).status_code == 429
        assert (await first).status_code == 200


async def test_queue_policy() -> None:
    one = {"e1": {"max_concurrent": 1}}
    for policy, order in (("fcfs", [0, 1, 2]), ("priority", [0, 2, 1])):
        async with (
            scripted(replace(WHOLE, delay=0.1)) as engine,
            gateway_over(configured(engine, engine_fields=one, queue_policy=policy)) as (
                gateway,
                client,
            ),
        ):
            sent = [asyncio.ensure_future(client.post(CHAT, json=chat(seed=0)))]
            await until(lambda: bool(engine.bodies))
            for number in (1, 2):
                body = chat(seed=number, priority=-number)
                sent.append(asyncio.ensure_future(client.post(CHAT, json=body)))
                await until(lambda: gateway.flow_control.num_waiting == number)  # noqa: B023
            await asyncio.gather(*sent)
            assert [body["seed"] for body in engine.bodies] == order


async def test_where_engines_are_full_requests_wait_their_turn() -> None:
    slow = replace(WHOLE, delay=0.05)
    one = {"e1": {"max_concurrent": 1}}
    async with serving(slow, engine_fields=one) as (_, gateway, client):
        most = 0
        sent = [asyncio.ensure_future(client.post(CHAT, json=chat(seed=n))) for n in range(6)]
        while not all(each.done() for each in sent):
            most = max(most, len(gateway.upstreams.by_name["e1"].load.running))
            await asyncio.sleep(0.002)
        assert [(await each).status_code for each in sent] == [200] * 6
        assert most == 1 and gateway.flow_control.num_waiting == 0


async def test_a_tight_target_goes_first() -> None:
    slow = replace(WHOLE, delay=0.1)
    one = {"e1": {"max_concurrent": 1}}
    async with serving(slow, engine_fields=one) as (engine, gateway, client):
        first = asyncio.ensure_future(client.post(CHAT, json=chat(seed=0)))
        await until(lambda: bool(engine.bodies))
        wide = asyncio.ensure_future(client.post(CHAT, json=chat(seed=1, slo={"ttft_ms": 60_000})))
        await until(lambda: gateway.flow_control.num_waiting == 1)
        tight = asyncio.ensure_future(client.post(CHAT, json=chat(seed=2, slo={"ttft_ms": 900})))
        await asyncio.gather(first, wide, tight)
        assert [body["seed"] for body in engine.bodies] == [0, 2, 1]


async def test_who_waits_may_leave_and_no_place_is_lost() -> None:
    slow = replace(WHOLE, delay=0.15)
    one = {"e1": {"max_concurrent": 1}}
    async with scripted(slow) as engine:
        config = configured(engine, engine_fields=one, max_num_waiting=2, queue_timeout=0.3)
        async with gateway_over(config) as (gateway, client):
            first = asyncio.ensure_future(client.post(CHAT, json=chat()))
            await until(lambda: bool(engine.bodies))
            leaves = asyncio.ensure_future(client.post(CHAT, json=chat()))
            await until(lambda: gateway.flow_control.num_waiting == 1)
            leaves.cancel()
            await until(lambda: gateway.flow_control.num_waiting == 0)
            assert (await first).status_code == 200
            sent = [asyncio.ensure_future(client.post(CHAT, json=chat())) for _ in range(6)]
            statuses = [(await each).status_code for each in sent]
            # the bound refuses some at once, the time limit drops what waits too long
            assert statuses.count(200) >= 2 and set(statuses) == {200, 429}
            assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_keys_have_limits() -> None:
    ann = replace(
        ApiKey.of("ann", "user", "secret-ann"), limits={"requests": Rate.parse("2/300day")}
    )
    bob = ApiKey.of("bob", "user", "secret-bob")
    counted = Step(
        parts=(b'{"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":10}}',),
        stream=False,
    )
    async with serving(counted, callers=(ann, bob), rate_limit_tokens="200/300day") as (
        _,
        _,
        client,
    ):
        headers = {"authorization": "Bearer secret-ann"}
        for left in ("1", "0"):
            answer = await client.post(CHAT, json=chat(max_tokens=20), headers=headers)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        refused = await client.post(CHAT, json=chat(max_tokens=20), headers=headers)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 60
        other = {"authorization": "Bearer secret-bob"}
        # what was reserved and not used is given back: of 8 and 100 tokens 13 are
        statuses = [
            (await client.post(CHAT, json=chat(max_tokens=100), headers=other)).status_code
            for _ in range(10)
        ]
        assert statuses == [200] * 8 + [429] * 2
        never = await client.post(CHAT, json=chat(max_tokens=500), headers=other)
        assert never.status_code == 400


async def test_the_file_is_read_again() -> None:
    slow = replace(WHOLE, delay=0.2)
    async with (
        scripted(slow) as old,
        scripted(WHOLE) as new,
        gateway_over(configured(old)) as (gateway, client),
    ):
        under_way = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(old.bodies))
        model = ModelConfig(name="chat", tiers=(("e1:m",),))
        changed = await gateway.reload(configured(new, models=(model,)), KeyRing(()))
        assert changed == ["engine e1 replaced", "models: chat"]
        # what runs at an engine that is gone from the file runs on
        assert (await client.post(CHAT, json=chat(model="chat"))).status_code == 200
        assert (len(old.bodies), len(new.bodies)) == (1, 1)
        assert (await client.post(CHAT, json=chat())).status_code == 404
        assert (await under_way).status_code == 200
        assert await gateway.reload(configured(new, models=(model,)), KeyRing(())) == []
        more = configured(new, old, models=(model,), port=9, max_attempts=1)
        assert await gateway.reload(more, KeyRing(())) == [
            "engine e2 added", "max_attempts 3 -> 1", "port needs a restart",
        ]  # fmt: skip
        status = (await client.get("/status")).json()
        assert sorted(status["engines"]) == ["e1", "e2"]


@pytest.mark.parametrize("metric", ["vllm:num_requests_running", "llamacpp:requests_processing"])
async def test_behind_text_where_that_is_wanted(metric: str) -> None:
    told_by = f"{metric} 0.0\n"
    pages: dict[str, Any] = {"/props": {}}
    rest = Step(parts=chat_chunks(WORDS[2:], ids=False, created=2))
    asked = chat(stream=True, max_tokens=50, stream_options={"include_usage": True}, seed=3)
    for by_text in (False, True):
        async with (
            scripted(pieces(2, ids=False), metrics=told_by, pages=pages) as dies,
            scripted(rest, metrics=told_by, pages=pages) as lives,
            gateway_over(configured(dies, lives, resume_by_text=by_text)) as (gateway, client),
        ):
            prefer_others(gateway, "e2")
            told = streamed(await client.post(CHAT, json=asked))
            if not by_text:
                assert told[-2]["error"]["code"] == "engine_failed" and not lives.bodies
                continue
            assert text_of(told) == "".join(WORDS)
            (body,) = lives.bodies
            assert body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
            assert body["continue_final_message"] is True
            assert body["add_generation_prompt"] is False
            assert body["max_tokens"] == 48 and body["seed"] != 3
            assert told[-2]["usage"]["completion_tokens"] == 5
            notes = [chunk["paceline"] for chunk in told[:-1] if "paceline" in chunk]
            assert notes == [{"engine": "e2", "attempts": 2, "resumed": 1, "exact": False}]
            # what a format or tools ask of the rest, text cannot carry over
            dies.script[:] = [pieces(2, ids=False)]
            formed = await client.post(
                CHAT, json=asked | {"response_format": {"type": "json_object"}}
            )
            assert "error" in streamed(formed)[-2]


async def test_a_caller_who_reads_slowly_holds_its_engine_back() -> None:
    words = tuple(f" {number:0100d}" for number in range(20_000))
    parts = chat_chunks(words, ids=False)
    long = Step(parts=tuple(b"".join(parts[i : i + 50]) for i in range(0, len(parts), 50)))
    async with serving(long) as (engine, gateway, client):
        connection = socket.socket()
        # or the system would hold all of it for the caller
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.connect(("127.0.0.1", client.base_url.port or 0))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await until(lambda: bool(engine.bodies))
        (attempt,) = gateway.upstreams.by_name["e1"].running
        held: list[int] = []
        for _ in range(40):
            await asyncio.sleep(0.02)
            held.append(attempt._owner._response.num_waiting)  # type: ignore[attr-defined]
        # of more than 3 MB no more than a read or two beyond the bound is held
        assert max(held) < 600_000 and held[-1] == held[-5]
        assert attempt.connection.is_paused  # type: ignore[attr-defined]
        got = b""
        while data := await reader.read(1 << 16):
            got += data
        writer.close()
        assert got.count(b"data: ") == len(parts) - 1 and b"[DONE]" in got
