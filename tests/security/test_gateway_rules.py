"""Rules of a gateway that stands between strangers and engines with keys; tests/gateway/
test_security.py has those that need no keys."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.gateway.settings.config import parse_config
from paceline.http.keys import ApiKey
from paceline.http.upstream import ConnectError, Connection, Origin, Pool
from paceline.routing import prefix_chain
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
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
)

SECRET = "sk-engine-1234567890"
ANN = ApiKey.of("ann", "user", "secret-ann")
ROOT = ApiKey.of("root", "admin", "secret-root")


class _Peer:
    """A transport that leads somewhere."""

    def __init__(self, address: Any) -> None:
        self._address = address

    def get_extra_info(self, name: str) -> Any:
        assert name == "peername"
        return self._address


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        (("169.254.169.254", 80), True),
        (("169.254.170.2", 80), True),
        (("::ffff:169.254.169.254", 80, 0, 0), True),
        (("fe80::1%eth0", 80, 0, 2), True),
        (("fd00:ec2::254", 80, 0, 0), True),
        (("100.100.100.200", 80), True),
        (("168.63.129.16", 80), True),
        (("127.0.0.1", 80), False),
        (("10.0.0.5", 8000), False),
        (("fd00::5", 8000, 0, 0), False),
        ("/a/socket", False),
    ],
)
def test_the_address_that_answers_is_looked_at_whatever_its_name(
    address: Any, refused: bool
) -> None:
    connection = Connection(Pool(Origin.of("http://x"), connect_timeout=1.0, idle=1.0))
    connection._transport = _Peer(address)  # type: ignore[assignment]
    assert connection.leads_to_credentials == refused


async def test_nothing_is_sent_to_where_credentials_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "leads_to_credentials", True)
    async with scripted(WHOLE) as engine:
        pool = Pool(Origin.of(engine.url), connect_timeout=1.0, idle=1.0)
        with pytest.raises(ConnectError, match="hands out credentials in clouds"):
            await pool.connect()
        await asyncio.sleep(0)
        assert not len(pool)


async def test_no_other_spelling_of_a_path_gets_round_its_scope() -> None:
    spellings = (
        "/metrics/", "//metrics", "/./metrics", "/v1/../metrics", "/%6detrics", "/metrics%00",
        "/METRICS", "http://127.0.0.1/metrics", "/status;x", "/health/../status",
        "/health/live/../../status", "/admin/engines/e1/drain/", "/x/../admin/engines/e1/drain",
        "/ui/../status", "/ui/v/x/../../../metrics", "/ui/../admin/engines/e1/drain",
    )  # fmt: skip
    async with serving(WHOLE, callers=(ANN, ROOT), metrics=PACELINE_METRICS) as (
        _,
        gateway,
        client,
    ):
        port = client.base_url.port
        for target in spellings:
            for method in ("GET", "POST"):
                for key in ("", "Authorization: Bearer secret-ann\r\n"):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(
                        f"{method} {target} HTTP/1.1\r\nHost: /health\r\n{key}"
                        "X-Original-URL: /health\r\nX-Forwarded-Prefix: /health\r\n"
                        "Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
                    )
                    answer = await reader.read()
                    writer.close()
                    status = int(answer.split(b" ")[1])
                    assert status in (400, 401, 403, 404, 405), (method, target, key)
                    assert b"paceline:gateway" not in answer and b'"breaker"' not in answer
        assert not gateway.upstreams.by_name["e1"].draining


async def test_every_path_times_every_caller() -> None:
    wanted = {
        "/health": "nobody", "/health/live": "nobody", "/health/ready": "nobody", "/ping": "nobody",
        "/v1/models": "user", "/v1/models/m": "user", "/version": "user",
        "/status": "admin", "/metrics": "admin", "/admin/engines/e1/undrain": "admin",
        # of engines, never handed on
        "/slots": "none", "/props": "none", "/tokenize": "none", "/v1/loads": "none",
        "/server_info": "none", "/load": "none", "/api/ps": "none",
    }  # fmt: skip
    async with serving(WHOLE, callers=(ANN, ROOT), metrics=PACELINE_METRICS) as (engine, _, client):
        for path, least in wanted.items():
            for who, key in (("nobody", None), ("user", "secret-ann"), ("admin", "secret-root")):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                method = "POST" if path.startswith("/admin") else "GET"
                status = (await client.request(method, path, headers=headers)).status_code
                ranks = ["nobody", "user", "admin", "none"]
                if ranks.index(who) >= ranks.index(least):
                    assert status == 200, (path, who)
                else:
                    assert status in (401, 403, 404), (path, who)
        # only what the gateway itself asks for
        assert set(engine.paths) <= {"/metrics", "/v1/models"}


async def test_the_gateways_key_is_in_no_answer_log_or_repr(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "paceline")
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    said = json.dumps({"error": {"message": f"bad request with key {SECRET}"}}).encode()
    event = b"data: " + said + b"\n\n"
    part = chat_chunks(WORDS, ids=False)[:2]
    fields = {"e1": {"api_key_env": "ENGINE_KEY"}}
    for step in (
        Step(status=400, parts=(said,), stream=False),
        Step(status=401, parts=(said,), stream=False),
        Step(status=503, parts=(said,), stream=False),
        Step(parts=(event,)),
        Step(parts=(*part, event)),
        Step(raw=f"HTTP/1.1 200 {SECRET}\r\n\r".encode()),
    ):
        async with serving(step, engine_fields=fields) as (engine, gateway, client):
            for stream in (True, False) if step.status != 200 else (True,):
                answer = await client.post(CHAT, json=chat(stream=stream))
                assert SECRET not in answer.text + str(answer.headers)
            for path in ("/status", "/metrics"):
                assert SECRET not in (await client.get(path)).text
            state = gateway.upstreams.by_name["e1"]
            assert SECRET not in repr(state.config) + repr(gateway.config) + repr(vars(state))
            assert engine.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in caplog.text


async def test_a_changed_address_does_not_inherit_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key goes to the address that the file names, and connections to the old one are not
    used for what comes after."""
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    fields = {"e1": {"api_key_env": "ENGINE_KEY"}}
    async with (
        scripted(WHOLE) as old,
        scripted(WHOLE) as new,
        gateway_over(configured(old, engine_fields=fields)) as (gateway, client),
    ):
        await client.post(CHAT, json=chat())
        await gateway.reload(configured(new), gateway.keys)
        await client.post(CHAT, json=chat())
        assert (len(old.bodies), len(new.bodies)) == (1, 1)
        # without being told again, no key
        assert "authorization" not in new.headers[0]


async def test_an_answer_that_is_packed_is_refused() -> None:
    packed = Step(parts=(b"\x1f\x8b" + b"x" * 100,), headers=(("content-encoding", "gzip"),))
    async with serving(packed) as (engine, _, client):
        for stream in (True, False):
            answer = await client.post(CHAT, json=chat(stream=stream))
            assert answer.status_code == 503 and "compressed" in answer.text
        assert engine.headers[0]["accept-encoding"] == "identity"


async def test_an_engine_cannot_forge_events() -> None:
    chunk = b'{"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"a"}%b}]}'
    parts = (
        b": hello\nevent: forged\nid: 7\nretry: 1\n\n",
        b": cr\revent: forged\r\n\r\n",
        b"data: " + (chunk % b"").replace(b",", b",\ndata: ", 1) + b"\n\n",
        b"event: forged\nid: 8\ndata: " + chunk % b',"finish_reason":"stop"' + b"\n\n",
        b"data: [DONE]\n\n",
    )
    async with serving(Step(parts=parts)) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert b"forged" not in answer.content
        lines = [line for line in answer.text.split("\n") if line]
        assert all(line.startswith((":", "data: ")) for line in lines), lines
        assert len([c for c in streamed(answer) if c != "[DONE]" and "choices" in c]) == 2
    # a carriage return ends a line: this is no comment, and no chunk either
    async with serving(Step(parts=(b": cr\rdata: forged\r\n\r\n", *parts))) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.status_code == 503 and b"forged" not in answer.content


async def test_local_only_holds_for_retries_resumes_and_long_prompts() -> None:
    models = (
        ModelConfig(
            name="chat",
            tiers=(("e1:m", "e2:m"), ("e3:m",)),
            local_only=True,
            pressure_fallback=True,
            length_over={"100": "long"},
        ),
        ModelConfig(name="long", tiers=(("e3:m", "e2:m"),), local_only=True),
    )
    pressed = PACELINE_METRICS.replace("pressure_level 0.0", "pressure_level 4.0")
    long = [{"role": "user", "content": "word " * 300}]
    for step in (refused(503), refused(400), pieces(2), pieces(0), Step(raw=b"")):
        async with (
            scripted(step, metrics=pressed) as one,
            scripted(step, metrics=pressed) as two,
            scripted(GOOD, metrics=PACELINE_METRICS) as far,
            gateway_over(
                configured(one, two, far, models=models, engine_fields={"e3": {"cloud": True}})
            ) as (_, client),
        ):
            for body in (chat(model="chat", stream=True), chat(model="chat", messages=long)):
                await client.post(CHAT, json=body)
            assert one.bodies or two.bodies
            assert not far.bodies


@pytest.mark.parametrize("tiers", ['[["far"]]', '[["far"], ["far"]]'])
def test_local_only_without_a_local_engine_is_refused(tiers: str) -> None:
    text = (
        '[[engines]]\nname = "far"\nurl = "https://example.com"\ncloud = true\n'
        f'[[models]]\nname = "m"\nlocal_only = true\ntiers = {tiers}\n'
    )
    with pytest.raises(Exception, match="cloud = true"):
        parse_config(text.encode())


async def test_where_a_prompt_went_tells_no_other_tenant() -> None:
    """Routing by prefixes is by tenant, so nobody learns by time what others asked."""
    assert not set(prefix_chain(b"x" * 600, b"ann")) & set(prefix_chain(b"x" * 600, b"bob"))
    bob = ApiKey.of("bob", "user", "secret-bob")
    messages = [{"role": "user", "content": "word " * 400}]
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as one,
        scripted(WHOLE, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two), (ANN, bob)) as (gateway, client),
    ):
        prefer_others(gateway, "e2")
        for name in ("ann", "bob"):
            headers = {"authorization": f"Bearer secret-{name}"}
            await client.post(CHAT, json=chat(messages=messages), headers=headers)
            if name == "ann":
                seen = set(gateway.upstreams.by_name["e1"].load.prefixes.runs)
        after = set(gateway.upstreams.by_name["e1"].load.prefixes.runs)
        assert seen and len(after) == 2 * len(seen)


async def test_limits_of_an_engines_account_are_not_told() -> None:
    names = (
        ("x-ratelimit-remaining-tokens", "7"), ("openai-organization", "ours"),
        ("anthropic-organization-id", "ours"), ("x-envoy-upstream-service-time", "3"),
        ("location", "http://10.0.0.1/"), ("alt-svc", "h3"),
    )  # fmt: skip
    step = Step(parts=(b'{"choices":[]}',), stream=False, headers=names)
    async with serving(step) as (_, _, client):
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200 and not {n for n, _ in names} & set(answer.headers)
