"""What neither a caller nor an engine can make of a gateway."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from paceline.gateway.proxy.context import salt_of
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WORDS,
    chat,
    configured,
    gateway_over,
    serving,
    streamed,
    text_of,
)

ANSWER = b'{"id":"x","model":"m","choices":[]}'
WHOLE = Step(parts=(ANSWER,), stream=False)


async def test_callers_headers_stay_with_the_gateway() -> None:
    forged = {
        "authorization": "Bearer secret-ann",
        "cookie": "a=b",
        "forwarded": "for=1.2.3.4",
        "x-forwarded-for": "1.2.3.4",
        "x-api-key": "other",
        "x-llm-d-inference-fairness-id": "somebody-else",
        "x-hop": "1",
        "connection": "x-hop",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    ann = ApiKey.of("ann", "user", "secret-ann")
    async with serving(WHOLE, callers=(ann,), metrics=PACELINE_METRICS) as (engine, _, client):
        assert (await client.post(CHAT, json=chat(), headers=forged)).status_code == 200
        (seen,) = engine.headers
        assert seen["traceparent"] == forged["traceparent"]
        # who asks is the key's name, whatever the caller says
        assert seen["x-llm-d-inference-fairness-id"] == "ann"
        assert not set(seen) & {
            "authorization", "cookie", "forwarded", "x-forwarded-for", "x-api-key", "x-hop",
        }  # fmt: skip
        assert seen["host"] == f"127.0.0.1:{engine.port}"


async def test_an_upgrade_costs_no_body() -> None:
    """Nor is a body that came apart a request of its own."""
    said = b'{"id":"x","model":"m","choices":[{"index":0,"message":{"content":"hi"}}]}'
    text = json.dumps(chat()).encode()
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n".ljust(len(text))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    async with (
        scripted(Step(parts=(said,), stream=False), metrics=PACELINE_METRICS) as engine,
        gateway_over(configured(engine)) as (_, client),
    ):
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body, status in ((text, "200"), (hidden, "400")):
            writer.write(head.encode())
            await asyncio.sleep(0.05)
            writer.write(body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            length = re.search(rb"content-length: (\d+)", answer)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).count(b"HTTP/1.1 ") == 1
        writer.close()
        assert [body["messages"] for body in engine.bodies] == [chat()["messages"]]


async def test_engines_headers_stay_there_too() -> None:
    names = (("set-cookie", "a=b"), ("server", "x"), ("x-internal", "10.0.0.1"), ("via", "y"))
    async with serving(Step(parts=(ANSWER,), stream=False, headers=names)) as (_, _, client):
        answer = await client.post(CHAT, json=chat())
        assert not {name for name, _ in names} & set(answer.headers)


async def test_an_unsolicited_answer_reaches_no_caller() -> None:
    """An engine that sends another answer's beginning behind the end of one: who asks next would
    be given it."""
    begins = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    faulty = Step(parts=chat_chunks(WORDS), behind=begins)
    async with (
        scripted(faulty, metrics=PACELINE_METRICS) as engine,
        gateway_over(configured(engine, poll_interval=60.0)) as (gateway, client),
    ):
        for _ in range(3):
            told = streamed(await client.post(CHAT, json=chat(stream=True)))
            assert text_of(told) == "".join(WORDS) and told[-1] == "[DONE]"
        assert len(engine.bodies) == 3 and gateway.upstreams.by_name["e1"].pool.num_unsolicited == 3
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_unsolicited_responses_total{engine="e1"} 3.0' in metrics


async def test_a_url_in_a_request_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    async with (
        scripted(WHOLE) as engine,
        scripted(WHOLE) as thief,
        gateway_over(configured(engine, engine_fields={"e1": {"api_key_env": "ENGINE_KEY"}})) as (
            _,
            client,
        ),
    ):
        fields = {"api_base": thief.url, "base_url": thief.url, "url": thief.url}
        headers = {"host": f"127.0.0.1:{thief.port}", "x-engine-url": thief.url}
        assert (await client.post(CHAT, json=chat(**fields), headers=headers)).status_code == 200
        assert not thief.headers
        assert engine.headers[0]["authorization"] == "Bearer sk-engine"
        status = await client.get("/status")
        assert "sk-engine" not in status.text


async def test_a_redirect_is_not_followed() -> None:
    async with scripted(WHOLE) as other:
        moved = Step(status=307, headers=(("location", other.url + CHAT),), stream=False)
        async with serving(moved) as (_, _, client):
            answer = await client.post(CHAT, json=chat())
            assert answer.status_code == 502 and not other.bodies


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 0x5\r\n",
        "X-Folded: a\r\n b\r\nContent-Length: 5\r\n",
        "X-Nul: a\x00b\r\nContent-Length: 5\r\n",
    ],
)
async def test_a_head_with_two_meanings_is_refused(head: str) -> None:
    async with serving(WHOLE) as (engine, _, client):
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n"
            "5\r\nhello\r\n0\r\n\r\n".encode()
        )
        writer.write_eof()
        status = (await reader.read()).split(b" ")[1:2]
        writer.close()
        assert status == [b"400"] and not engine.bodies


async def test_other_peoples_keys_share_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALT", "a secret")
    keys = (ApiKey.of("ann", "user", "secret-ann"), ApiKey.of("bob", "user", "secret-bob"))
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as engine,
        gateway_over(configured(engine, salt_env="SALT"), keys) as (_, client),
    ):
        for name in ("ann", "bob", "ann"):
            headers = {"authorization": f"Bearer secret-{name}"}
            # a salt that the caller chose does not stand
            await client.post(CHAT, json=chat(cache_salt="mine"), headers=headers)
        salts = [body["cache_salt"] for body in engine.bodies]
        assert salts[0] == salts[2] != salts[1] and "mine" not in salts
    assert salt_of("a secret", "") == "" and len(salt_of("s", "t")) == 32


async def test_what_an_engine_says_is_bounded() -> None:
    endless = Step(parts=(b"data: " + b"x" * 600_000, b"x" * 600_000), then="stall")
    async with serving(endless) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.status_code == 503
        assert "more than" in answer.json()["error"]["message"]


async def test_a_long_head_of_an_engine_is_cut() -> None:
    raw = b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n"
    async with serving(Step(raw=raw)) as (_, _, client):
        assert (await client.post(CHAT, json=chat())).status_code == 503


async def test_pages_of_other_origins_may_not_send() -> None:
    async with serving(WHOLE) as (engine, _, client):
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = await client.post(CHAT, json=chat(), headers=headers)
            assert answer.status_code == 403
        assert not engine.bodies


async def test_bodies_are_bounded() -> None:
    async with serving(WHOLE, max_body_size=2000) as (engine, _, client):
        long: dict[str, Any] = chat(messages=[{"role": "user", "content": "x" * 3000}])
        assert (await client.post(CHAT, json=long)).status_code == 413

        async def parts() -> Any:
            for _ in range(30):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        assert (await client.post(CHAT, content=parts(), headers=headers)).status_code == 413
        plain = await client.post(
            CHAT, content=json.dumps(chat()), headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        assert not engine.bodies
