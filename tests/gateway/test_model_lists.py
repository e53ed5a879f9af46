"""When engines are asked which models they have."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.gateway.upstreams import registry
from tests.gateway.fault_server import scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    chat,
    configured,
    gateway_over,
    refused,
    serving,
    until,
)


async def test_who_is_not_polled_is_asked_for_its_models_as_seldom_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_MAX_POLL_WAIT", 0.005)
    monkeypatch.setattr(registry, "_MODEL_POLLS", 30)
    listed = {"data": [{"id": "m"}]}
    async with scripted(GOOD, pages={"/v1/models": listed}) as engine:
        config = configured(engine, kinds={"e1": "openai"}, poll_interval=0.01)
        before = time.monotonic()
        async with gateway_over(config) as (gateway, _):
            one = gateway.upstreams.by_name["e1"]
            for name in ("n", "o"):
                listed["data"].append({"id": name})
                await until(lambda name=name: name in one.models)
            # 30 times the interval between polls, and once at the start
            assert engine.asked.count("/v1/models") - 1 <= (time.monotonic() - before) / 0.3


async def test_a_list_that_answers_an_error_is_not_asked_for_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_MAX_POLL_WAIT", 0.005)
    monkeypatch.setattr(registry, "_MODEL_POLLS", 20)
    async with scripted(GOOD, pages={"/v1/models": (404, {})}) as engine:
        config = configured(engine, kinds={"e1": "openai"}, poll_interval=0.01)
        before = time.monotonic()
        async with gateway_over(config) as (gateway, _):
            one = gateway.upstreams.by_name["e1"]
            assert one.trouble == "/v1/models answers 404"
            await until(lambda: engine.asked.count("/v1/models") == 3)
            # 20 times the interval between polls, and once at the start
            assert time.monotonic() - before > 0.4


async def test_who_fails_a_request_is_asked_for_its_models_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been started anew, as something else."""
    monkeypatch.setattr(registry, "_MAX_POLL_WAIT", 0.005)
    monkeypatch.setattr(registry, "_MODEL_POLLS", 10_000)
    listed = {"data": [{"id": "m"}]}
    async with scripted(refused(500), WHOLE, pages={"/v1/models": listed}) as engine:
        config = configured(engine, kinds={"e1": "openai"}, poll_interval=0.01)
        async with gateway_over(config) as (gateway, http):
            one = gateway.upstreams.by_name["e1"]
            listed["data"].append({"id": "n"})
            await asyncio.sleep(0.1)
            assert set(one.models or ()) == {"m"} and engine.asked.count("/v1/models") == 1
            assert (await http.post(CHAT, json=chat())).status_code == 500
            assert one.failed_at > 0.0
            await until(lambda: set(one.models or ()) == {"m", "n"})


async def test_bounds_hold_while_a_new_engine_is_still_being_asked() -> None:
    async with serving(GOOD) as (engine, gateway, _):
        assert not gateway.upstreams.has_bounds
        before = gateway.upstreams.by_name["e1"]
        engine.frozen = True
        bound = configured(engine, engine_fields={"e1": {"max_concurrent": 1}})
        changing = asyncio.ensure_future(gateway.reload(bound, gateway.keys))
        await until(lambda: gateway.upstreams.by_name["e1"] is not before)
        assert gateway.upstreams.has_bounds and not changing.done()
        engine.frozen = False
        await changing
        await gateway.reload(configured(engine), gateway.keys)
        assert not gateway.upstreams.has_bounds
