"""Pools whose engines are the addresses of a name: they come and go under streams."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.errors import ConfigError
from paceline.gateway import Gateway, GatewayConfig, ModelConfig
from paceline.gateway.settings.config import PoolConfig, check_config, parse_config
from paceline.gateway.settings.engines import members_at
from paceline.gateway.upstreams.discovery import resolve
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, chat, gateway_over, is_clean, streamed, text_of, until

WORDS = [f" w{number}" for number in range(60)]
SLOW = Step(parts=chat_chunks(WORDS), gap=0.02)
KEY = "secret-root-0123"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Zone:
    """A name, and how many of its addresses there are now; an error instead of them."""

    def __init__(self) -> None:
        self.hosts: Collection[str] = ()
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def resolve(self, host: str) -> Collection[str]:
        self.asked.append(host)
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.hosts


@asynccontextmanager
async def named_pool(
    monkeypatch: pytest.MonkeyPatch, *steps: Step
) -> AsyncIterator[tuple[list[Engine], Zone, Gateway, httpx.AsyncClient]]:
    """Engines at the same port of different addresses, and a gateway that knows their name."""
    zone = Zone()
    monkeypatch.setattr("paceline.gateway.app.resolve", zone.resolve)
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for host, step in zip(HOSTS, steps, strict=False):
            fields: dict[str, Any] = {"port": engines[0].port} if engines else {}
            engine = scripted(step, host=host, metrics=PACELINE_METRICS, **fields)
            engines.append(await stack.enter_async_context(engine))
        keys = (ApiKey.of("root", "admin", KEY),)
        config = GatewayConfig(
            poll_interval=0.03,
            models=(ModelConfig(name="m", tiers=(("@chat",),)),),
            pools=(PoolConfig(name="chat", dns=f"engines.test:{engines[0].port}", every=0.1),),
        )
        gateway, client = await stack.enter_async_context(gateway_over(config, keys))
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield engines, zone, gateway, client


def up(gateway: Gateway) -> set[str]:
    upstreams = gateway.upstreams.by_name.values()
    return {each.pool.origin.host for each in upstreams if each.models and not each.trouble}


async def test_three_addresses_come_and_go_under_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with named_pool(monkeypatch, SLOW, SLOW, SLOW) as (engines, zone, gateway, client):
        assert (await client.post(CHAT, json=chat())).status_code == 503
        zone.hosts = HOSTS[:1]
        await until(lambda: up(gateway) == {HOSTS[0]})
        calls = [asyncio.ensure_future(client.post(CHAT, json=chat(stream=True))) for _ in range(4)]
        await until(lambda: len(engines[0].bodies) >= 4)
        # two more appear, and the first one leaves: its streams go on there
        zone.hosts = HOSTS[1:]
        await until(lambda: up(gateway) == {*HOSTS[1:]})
        late = [asyncio.ensure_future(client.post(CHAT, json=chat(stream=True))) for _ in range(4)]
        for answer in await asyncio.gather(*calls, *late):
            chunks = streamed(answer)
            assert chunks[-1] == "[DONE]" and text_of(chunks) == "".join(WORDS)
        assert is_clean(gateway)
        assert len(engines[0].bodies) == 4
        assert sum(len(engine.bodies) for engine in engines[1:]) == 4
        assert set(zone.asked) == {"engines.test"}
        pool = gateway.upstreams.pools["chat"]
        assert {each.pool for each in pool.members.values()} == {"chat"}


async def test_a_resolver_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "paceline.gateway")
    async with named_pool(monkeypatch, SLOW) as (_, zone, gateway, client):
        zone.hosts = HOSTS[:1]
        await until(lambda: up(gateway) == {HOSTS[0]})
        for error, hosts in (
            (socket.gaierror(-3, "Temporary failure in name resolution"), ()),
            (None, ()),
            # a cloud's address with credentials is no engine
            (None, ("169.254.169.254", HOSTS[0])),
        ):
            zone.error, zone.hosts = error, hosts
            asked = len(zone.asked)
            await until(lambda asked=asked: len(zone.asked) > asked + 1)
            assert up(gateway) == {HOSTS[0]}
        told = [r.getMessage() for r in caplog.records if "pool_unresolved" in r.getMessage()]
        # each once, and a gateway that starts before its engines says so too
        assert [("Temporary" in m, "no address" in m, "credentials" in m) for m in told] == [
            (False, True, False), (True, False, False), (False, True, False), (False, False, True),
        ]  # fmt: skip
        # nobody else may name its engines
        put = await client.put("/admin/pools/chat", json={"epoch": 1, "version": 1, "engines": []})
        assert put.status_code == 409 and "are the addresses of engines.test:" in put.text


async def test_a_reload_changes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with named_pool(monkeypatch, SLOW) as ([engine], zone, gateway, client):
        zone.hosts = HOSTS[:1]
        await until(lambda: up(gateway) == {HOSTS[0]})
        models = gateway.config.models
        other = PoolConfig(name="chat", dns=f"others.test:{engine.port}", every=0.1)
        await gateway.reload(
            GatewayConfig(poll_interval=0.03, models=models, pools=(other,)), gateway.keys
        )
        await until(lambda: "others.test" in zone.asked)
        # without a name it is a controller's again
        await gateway.reload(GatewayConfig(poll_interval=0.03, models=models), gateway.keys)
        asked = len(zone.asked)
        word = {"epoch": 0, "version": 0, "engines": [{"name": "a", "url": engine.url}]}
        assert (await client.put("/admin/pools/chat", json=word)).status_code == 200
        await until(lambda: up(gateway) == {HOSTS[0]})
        assert list(gateway.upstreams.by_name) == ["a"]
        await asyncio.sleep(0.3)
        assert len(zone.asked) <= asked + 1


async def test_another_name_is_not_due_when_the_one_before_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with named_pool(monkeypatch, SLOW) as ([engine], zone, gateway, _):
        models = gateway.config.models
        for host in ("first.test", "second.test"):
            pool = PoolConfig(name="chat", dns=f"{host}:{engine.port}", every=3600.0)
            config = GatewayConfig(poll_interval=0.03, models=models, pools=(pool,))
            await gateway.reload(config, gateway.keys)
            await until(lambda host=host: host in zone.asked)


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup keeps one of the few threads that all others need."""
    monkeypatch.setattr("paceline.gateway.upstreams.discovery._TIMEOUT", 0.02)
    async with named_pool(monkeypatch, SLOW) as (_, zone, gateway, _):
        zone.answers.clear()
        zone.hosts, asked = HOSTS[:1], len(zone.asked)
        await asyncio.sleep(0.5)
        assert len(zone.asked) == asked + 1
        zone.answers.set()
        await until(lambda: up(gateway) == {HOSTS[0]})


async def test_a_fault_ends_no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    async with named_pool(monkeypatch, SLOW) as (_, zone, gateway, _):
        for error in (ValueError("embedded null byte"), RuntimeError("a fault")):
            zone.error, asked = error, len(zone.asked)
            await until(lambda asked=asked: len(zone.asked) > asked + 1)
        zone.error, zone.hosts = None, HOSTS[:1]
        await until(lambda: up(gateway) == {HOSTS[0]})


async def test_the_machines_own_resolver() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError):
        await resolve("no-such-host.invalid")


def test_addresses_of_both_families_are_engines() -> None:
    pool = PoolConfig(name="chat", dns="engines:8000", kind="vllm")
    assert pool.address == ("engines", 8000)
    told = members_at({"10.0.0.7", "fd00::7"}, 8000, pool, None)
    assert [(e.name, e.url, e.kind) for e in told.engines] == [
        ("10.0.0.7-8000", "http://10.0.0.7:8000", "vllm"),
        ("fd00--7-8000", "http://[fd00::7]:8000", "vllm"),
    ]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('dns = "engines"', "dns must be HOST:PORT, got 'engines'"),
        ('dns = "http://engines:8000"', "dns must be HOST:PORT"),
        ('dns = "engines:70000"', "dns must be HOST:PORT"),
        ('dns = "engines:80"\nevery = 0.01', "every must be 0.1 to 3600 s, got 0.01"),
        ("every = 5.0", "every and kind are of a pool with dns"),
    ],
)
def test_names_that_cannot_be(lines: str, why: str) -> None:
    text = f'[[models]]\nname = "m"\ntiers = [["@a"]]\n[[pools]]\nname = "a"\n{lines}\n'
    with pytest.raises(ConfigError, match=why):
        parse_config(text.encode())
    check_config(parse_config(text.replace(lines, 'dns = "engines:8000"\nevery = 5.0').encode()))
