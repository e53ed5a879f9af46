"""Callers of a gateway that hang up, send ahead, read slowly, or wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.gateway.proxy.response import Response
from paceline.gateway.proxy.usage_split import UsageSplit
from paceline.gateway.streams.openai_stream import OpenAIStreamRelay
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    chat,
    configured,
    gateway_over,
    is_clean,
    pieces,
    serving,
    until,
)


async def test_streams_asked_for_ahead_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one connection; each ends once, and nothing of it is held when the next one begins."""
    async with serving(GOOD) as (_, gateway, client):
        find = gateway.routes.find
        held = list[int]()

        def begins(*asked: Any, **named: Any) -> Any:
            held.append(gateway.in_flight)
            return find(*asked, **named)

        monkeypatch.setattr(gateway.routes, "find", begins)
        body = json.dumps(chat(stream=True)).encode()
        request = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        ).encode()
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(request + b"\r\n" + body + request + b"Connection: close\r\n\r\n" + body)
        told = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await until(lambda: is_clean(gateway))
    assert held == [0, 0]
    answers = told.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert len(answers) == 2
    for answer in answers:
        assert answer.count(b"data: [DONE]") == 1 and answer.count(b"\r\n0\r\n\r\n") == 1
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "fails",
    [(Response, "note_attempt"), (OpenAIStreamRelay, "begin_attempt"), (UsageSplit, "used")],
)
async def test_a_fault_of_ours_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: tuple[type, str]
) -> None:
    async with serving(GOOD) as (_, gateway, client):
        settled: list[Any] = []
        settle = gateway._admission.settle

        async def settles(admitted: Any, usage: Any) -> None:
            settled.append(usage)
            await settle(admitted, usage)

        def raises(*_: object, **__: object) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(gateway._admission, "settle", settles)
        monkeypatch.setattr(*fails, raises)
        with contextlib.suppress(httpx.HTTPError):
            await client.post(CHAT, json=chat(stream=True))
        await until(lambda: bool(settled) and is_clean(gateway))
    assert [list(usage) for usage in settled] == [[]]


async def test_a_caller_who_hangs_up_ends_the_work() -> None:
    async with serving(pieces(2, then="stall")) as (engine, gateway, client):
        async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
            assert response.status_code == 200
            await response.aiter_raw().__anext__()
        await until(lambda: engine.hung_up == 1)
        load = gateway.upstreams.by_name["e1"].load
        await until(lambda: not load.running)
        assert load.prefill_tokens == pytest.approx(0.0) == load.resident_tokens
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_requests_total{engine="e1",result="gone"} 1.0' in metrics
        # not its fault
        assert gateway.upstreams.by_name["e1"].breaker_state(gateway.now()) == "closed"


async def test_who_sends_ahead_is_answered_in_order() -> None:
    """A stream, a whole answer and a last one, on one connection and in one go."""

    def request(stream: bool, more: str = "") -> bytes:
        body = json.dumps(chat(stream=stream)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async with serving((GOOD, WHOLE, GOOD, WHOLE)) as (_, _, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(request(True) + request(False) + request(True, "connection: close\r\n"))
        said = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        heads = [part.split(b"\r\n\r\n")[0].lower() for part in said.split(b"HTTP/1.1 200 OK\r\n")]
        assert [b"transfer-encoding: chunked" in head for head in heads[1:]] == [True, False, True]
        assert [b"content-length" in head for head in heads[1:]] == [False, True, False]
        assert [b"connection: close" in head for head in heads[1:]] == [False, False, True]
        assert all(head.count(b"x-request-id: ") == 1 for head in heads[1:])
        assert said.count(b"[DONE]") == 2 and said.endswith(b"0\r\n\r\n")


async def test_a_slow_caller_is_no_stall_of_the_engine() -> None:
    """What waits for its caller is not read from the engine, which is silent for so long."""
    words = ("x" * 4096,) * 1500
    async with (
        scripted(Step(parts=chat_chunks(words)), metrics=PACELINE_METRICS) as engine,
        gateway_over(configured(engine, stall_timeout=0.3)) as (gateway, client),
    ):
        body = json.dumps(chat(stream=True)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            caller.setblocking(False)
            await loop.sock_connect(caller, ("127.0.0.1", client.base_url.port))
            await loop.sock_sendall(caller, head.encode() + body)
            state = gateway.upstreams.by_name["e1"]
            await until(lambda: any(c.is_paused for c in state.pool._open))
            paused_at = gateway.now()
            await until(lambda: gateway.now() - paused_at > 0.8)
            said = 0
            last = b""
            while part := await loop.sock_recv(caller, 1 << 20):
                said, last = said + len(part), (last + part)[-200:]
        assert said > sum(map(len, words)) and b"[DONE]" in last
        assert len(engine.bodies) == 1
        metrics = (await client.get("/metrics")).text
        assert 'gateway_requests_total{engine="e1",result="ok"} 1.0' in metrics
        assert "gateway_attempt_failures_total{" not in metrics


async def test_a_request_that_is_cut_off_while_it_waits_leaves_nothing_behind() -> None:
    """As at the end of a process that has no more time."""
    async with (
        scripted(replace(WHOLE, delay=0.5)) as engine,
        gateway_over(configured(engine, engine_fields={"e1": {"max_concurrent": 1}})) as (
            gateway,
            client,
        ),
    ):
        first = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(engine.bodies))
        before = asyncio.all_tasks()
        second = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: gateway.flow_control.num_waiting == 1)
        (served,) = [
            task
            for task in asyncio.all_tasks() - before
            if getattr(task.get_coro(), "__name__", "") == "run_asgi"
        ]
        served.cancel()
        await second
        assert gateway.flow_control.num_waiting == 0
        left = asyncio.all_tasks() - before - {second, asyncio.current_task()}
        assert not [
            task for task in left if "Placement" in repr(task) or "Event.wait" in repr(task)
        ]
        assert (await first).status_code == 200
        assert is_clean(gateway)
