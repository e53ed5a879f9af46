"""Pools: engines that are named, drained and replaced while the gateway runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.gateway import EngineConfig, Gateway, GatewayConfig, ModelConfig
from paceline.gateway.settings.config import PoolConfig, check_config
from paceline.gateway.upstreams.pools import UNHEARD_SECONDS, Pools
from paceline.http.keys import ApiKey, KeyRing
from tests.docs.pages import DOCS, blocks
from tests.gateway.fault_server import PACELINE_METRICS, Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, GOOD, chat, gateway_over, is_clean, streamed, text_of, until

KEY = "secret-root-0123"
ADMIN = {"Authorization": f"Bearer {KEY}"}
WORDS = [f" w{number}" for number in range(60)]
# as fast as the engine can, and one that is still at it after seconds
SLOW = Step(parts=chat_chunks(WORDS), gap=0.02)
POOL = "/admin/pools/chat"


@asynccontextmanager
async def pool_over(
    *steps: Step, **fields: Any
) -> AsyncIterator[tuple[list[Engine], Gateway, httpx.AsyncClient]]:
    """Engines that play these scripts, and a gateway whose pool is empty."""
    fields = {
        "poll_interval": 0.03,
        "models": (ModelConfig(name="m", tiers=(("@chat",),)),),
    } | fields
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(scripted(step, metrics=PACELINE_METRICS))
            for step in steps
        ]
        keys = ApiKey.of("root", "admin", KEY), ApiKey.of("ann", "user", "secret-ann-0123")
        over = gateway_over(GatewayConfig(**fields), keys)
        gateway, client = await stack.enter_async_context(over)
        client.headers.update(ADMIN)
        yield engines, gateway, client


def said(*engines: Engine, epoch: int = 1, version: int = 1, **more: Any) -> dict[str, Any]:
    named = [{"name": f"c{e.port}", "url": e.url} for e in engines]
    return {"epoch": epoch, "version": version, "engines": named, **more}


async def told(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    answer = await client.put(POOL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def all_up(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while not all(e["up"] for e in (await client.get(POOL)).json()["engines"].values()):
            await asyncio.sleep(0.01)


async def all_polled(gateway: Gateway) -> None:
    await until(lambda: all(e.models and not e.trouble for e in gateway.upstreams.by_name.values()))


async def test_a_gateway_starts_empty_and_serves_what_it_is_told() -> None:
    async with pool_over(GOOD) as ([engine], gateway, client):
        empty = await client.post(CHAT, json=chat())
        assert empty.status_code == 503 and int(empty.headers["retry-after"]) >= 1
        assert (await client.get("/health/ready")).status_code == 503
        first = await told(client, said(engine))
        # answered before the engine was
        assert first["engines"][f"c{engine.port}"]["up"] is False
        await all_up(client)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.status_code == 200 and (await client.get("/health/ready")).status_code == 200
        # the same word again changes nothing
        upstream = gateway.upstreams.by_name[f"c{engine.port}"]
        assert (await told(client, said(engine)))["version"] == 1
        assert gateway.upstreams.by_name[f"c{engine.port}"] is upstream
        assert 'gateway_pool_age_seconds{pool="chat"}' in (await client.get("/metrics")).text
        listed = (await client.get("/admin/pools")).json()["pools"]["chat"]
        assert listed["epoch"] == 1 and list(listed["engines"]) == [f"c{engine.port}"]


async def test_the_word_on_the_page() -> None:
    """docs/operate/fleet.md shows a PUT, of two engines on other hosts."""
    (block,) = [b for b in blocks(DOCS / "operate/fleet.md") if "-X PUT" in b.code]
    async with pool_over(GOOD, GOOD) as ((one, two), _, client):
        # the shell's time in milliseconds
        code = block.code.replace("'$(date +%s000)'", "1")
        word = code.partition("-d '")[2].partition("'")[0]
        word = word.replace("10.0.0.7:41877", f"127.0.0.1:{one.port}")
        body = json.loads(word.replace("10.0.0.5:41877", f"127.0.0.1:{two.port}"))
        engines = (await told(client, body))["engines"]
        assert {name: each["draining"] for name, each in engines.items()} == {
            "chat-4": False, "chat-2": True,
        }  # fmt: skip


async def test_engines_of_a_pool_keep_their_own_models_where_none_is_configured() -> None:
    async with pool_over(GOOD, models=(), pools=(PoolConfig(name="chat"),)) as (engines, _, client):
        empty = await client.post(CHAT, json=chat())
        assert empty.status_code == 503 and "retry-after" in empty.headers
        await told(client, said(*engines))
        await all_up(client)
        assert (await client.post(CHAT, json=chat(stream=True))).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (said(epoch=0, version=9), 409, "older than epoch 1, version 1"),
        (said(version=0), 409, "older"),
        ({"epoch": 1}, 400, "version"),
        (said() | {"wrong": 1}, 400, "wrong"),
        (said(epoch=-1), 400, "0 or more"),
        ({**said(), "engines": [{"name": "a b", "url": "http://x"}]}, 400, "letters"),
        ({**said(), "engines": [{"name": "a", "url": "ftp://x"}]}, 400, "http://HOST"),
        ({**said(), "engines": [{"name": "a", "url": "http://169.254.169.254"}]}, 400, "creden"),
        ({**said(), "engines": [{"name": "a", "url": "http://x"}] * 2}, 400, "occurs twice"),
        ({**said(), "engines": [{"name": "own", "url": "http://x"}]}, 400, "another engine named"),
    ],
)
async def test_a_bad_word_changes_nothing(body: dict[str, Any], status: int, why: str) -> None:
    own = EngineConfig(name="own", url="http://127.0.0.1:9")
    async with pool_over(GOOD, engines=(own,)) as ([engine], gateway, client):
        await told(client, said(engine))
        before = dict(gateway.upstreams.by_name)
        answer = await client.put(POOL, json=body)
        assert answer.status_code == status and why in answer.text
        assert gateway.upstreams.by_name == before


async def test_who_may_speak() -> None:
    async with pool_over(GOOD) as ([engine], _, client):
        assert (await client.put("/admin/pools/other", json=said(engine))).status_code == 404
        assert (await client.post(POOL, json=said(engine))).status_code == 405
        assert (await client.put(POOL, content=b"x" * (1 << 20 | 1))).status_code == 413
        for key, status in (("no", 401), ("secret-ann-0123", 403)):
            other = {"Authorization": f"Bearer {key}"}
            answer = await client.put(POOL, json=said(engine), headers=other)
            assert answer.status_code == status
            assert (await client.get("/admin/pools", headers=other)).status_code == status
        assert not (await client.get(POOL)).json()["engines"]


async def test_a_stream_moves_again_and_again_and_loses_nothing() -> None:
    """Each engine goes on behind what the caller has; five moves exceed ``max_resumes``."""
    async with pool_over(_from(0), _from(0), max_resumes=0, max_attempts=1) as (
        engines,
        gateway,
        client,
    ):
        await told(client, said(*engines))
        await all_up(client)
        answering = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        version = 1
        for count in range(1, 6):
            await until(lambda n=count: sum(len(e.bodies) for e in engines) == n)
            at = next(e for e in engines if gateway.upstreams.by_name[f"c{e.port}"].running)
            other = next(e for e in engines if e is not at)
            other.script[:] = [_from(8 * count)] if count < 5 else [_from(40, whole=True)]
            await until(lambda e=at, n=count: _emitted(gateway) >= 8 * n)
            version += 1
            name = f"c{at.port}"
            await told(client, said(*engines, version=version, draining=[name], move=[name]))
        chunks = streamed(await answering)
        assert chunks[-1] == "[DONE]" and text_of(chunks) == "".join(WORDS)
        resumed = [b for e in engines for b in e.bodies if "resume_output_ids" in b]
        assert sorted(len(body["resume_output_ids"]) for body in resumed) == [8, 16, 24, 32, 40]
        moved = (await client.get("/metrics")).text
        assert sum(float(line.split()[-1]) for line in moved.splitlines()
                   if line.startswith("paceline:gateway_moved_total{")) == 5  # fmt: skip
        assert is_clean(gateway) and "attempt_failures_total{" not in moved


def _from(start: int, *, whole: bool = False) -> Step:
    """The stream's next eight words behind ``start``, and then nothing; or all others."""
    words = WORDS[start:] if whole else WORDS[start : start + 8]
    parts = chat_chunks(words, first_id=start, reason="stop" if whole else None)
    return Step(parts=parts, then="end" if whole else "stall")


def _emitted(gateway: Gateway) -> int:
    found = [
        running._owner.relay.num_output_tokens  # type: ignore[attr-defined]
        for upstream in gateway.upstreams.by_name.values()
        for running in upstream.running
    ]
    return max(found, default=0)


async def test_a_stream_that_cannot_move_stays() -> None:
    async with pool_over(SLOW) as ([engine], gateway, client):
        name = f"c{engine.port}"
        await told(client, said(engine))
        await all_up(client)
        answering = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: _emitted(gateway) > 3)
        await told(client, said(engine, version=2, move=[name]))
        # retired while it runs
        gone = await told(client, said(version=3, draining=[name], move=[name]))
        assert gone["engines"][name]["requests"] == 1
        assert text_of(streamed(await answering)) == "".join(WORDS)
        assert (await client.post(CHAT, json=chat())).status_code == 503


async def test_a_stream_goes_on_at_a_drained_engine_rather_than_not_at_all() -> None:
    async with pool_over(_from(0), _from(8, whole=True)) as (engines, gateway, client):
        first, second = (f"c{engine.port}" for engine in engines)
        await told(client, said(*engines, draining=[second]))
        await all_polled(gateway)
        answering = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: _emitted(gateway) == 8)
        (running,) = gateway.upstreams.by_name[first].running
        running.give_up("it died")  # type: ignore[attr-defined]
        chunks = streamed(await answering)
        assert text_of(chunks) == "".join(WORDS)
        # a new request waits for no drained engine
        await told(client, said(*engines, version=2, draining=[first, second]))
        assert (await client.post(CHAT, json=chat())).status_code == 503


async def test_a_drained_engine_stays_so_with_another_address_or_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENGINES_KEY", "secret-engines-0123")
    async with pool_over(GOOD, GOOD) as ([engine, other], gateway, client):
        name = f"c{engine.port}"
        await told(client, said(engine, draining=[name]))
        await all_up(client)
        moved = {**said(engine, version=2, draining=[name])}
        moved["engines"] = [{"name": name, "url": other.url}]
        assert (await told(client, moved))["engines"][name]["draining"]
        keyed = replace(gateway.config, pools=(PoolConfig(name="chat", api_key_env="ENGINES_KEY"),))
        await gateway.reload(keyed, gateway.keys)
        assert gateway.upstreams.by_name[name].key and gateway.upstreams.by_name[name].draining
        assert (await told(client, moved))["engines"][name]["draining"]


async def test_other_hands_stay_off_a_pool(tmp_path: Any) -> None:
    """A reload keeps a pool's engines, and what an admin drained stays drained."""
    async with pool_over(GOOD, GOOD) as (engines, gateway, client):
        await told(client, said(*engines))
        await all_up(client)
        names = [f"c{engine.port}" for engine in engines]
        await client.post(f"/admin/engines/{names[0]}/drain")
        await told(client, said(*engines, version=2, draining=[names[1]]))
        await gateway.reload(gateway.config, gateway.keys)
        assert sorted(gateway.upstreams.by_name) == sorted(names)
        assert all(e["draining"] for e in (await client.get(POOL)).json()["engines"].values())
        back = await told(client, said(*engines, version=3))
        assert [back["engines"][name]["draining"] for name in names] == [True, False]
        clash = (EngineConfig(name=names[0], url="http://127.0.0.1:9"),)
        with pytest.raises(ConfigError, match="has an engine of that name"):
            await gateway.reload(GatewayConfig(engines=clash, models=gateway.config.models),
                                 KeyRing(()))  # fmt: skip


async def test_a_new_engine_of_a_pool_is_predicted_by_the_others() -> None:
    async with pool_over(GOOD, GOOD) as ([one, two], gateway, client):
        await told(client, said(one))
        first = gateway.upstreams.by_name[f"c{one.port}"].load
        for _ in range(100):
            first.latency.saw_next(1.0, 0.08)
        await told(client, said(one, two, version=2))
        second = gateway.upstreams.by_name[f"c{two.port}"].load
        assert second.latency.next_token(1.0) == pytest.approx(0.08, rel=0.05)


def test_a_pool_without_a_word_is_reported_once() -> None:
    pools = Pools(GatewayConfig(pools=(PoolConfig(name="a"),)))
    assert not list(pools.unheard(1e6)), "nothing was ever said"
    pools["a"].told_at = 10.0
    assert list(pools.unheard(10.0 + UNHEARD_SECONDS)) == ["a"]
    assert not list(pools.unheard(200.0))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "no \\[\\[engines\\]\\] and no \\[\\[pools\\]\\]"),
        ({"pools": (PoolConfig(name="a b"),)}, "a pool's name"),
        ({"pools": (PoolConfig(name="a"),) * 2}, "two pools are named 'a'"),
        ({"pools": (PoolConfig(name="a", api_key_env="NO_SUCH_KEY"),)}, "NO_SUCH_KEY is not set"),
    ],
)
def test_configurations_that_cannot_be(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_config(GatewayConfig(**fields))
