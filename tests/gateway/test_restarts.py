"""Engines that are started anew between two looks are asked anew.

What they tell by: when their process began, a connection that they closed, a proxy before them, and
their list of models.
"""

from __future__ import annotations

import math
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from paceline.gateway.upstreams import registry
from tests.gateway.fault_server import PACELINE_METRICS, scripted
from tests.gateway.helpers import CHAT, GOOD, VLLM, configured, gateway_over, serving, until
from tests.gateway.upstreams.test_capabilities import (
    knows_neither,
    old_template,
    probed,
    refuses_both,
    template,
)

LLAMA = "llamacpp:requests_deferred 0\nllamacpp:requests_processing 0\n"
SGLANG = "sglang:num_queue_reqs 0\nsglang:num_running_reqs 0\n"
# of an engine that is told to be so
UNPOLLED = {"kinds": {"e1": "openai"}, "engine_fields": {"e1": {"probe": "try"}}}


@pytest.fixture(autouse=True)
def no_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are read for no other reason than a restart."""
    monkeypatch.setattr(registry, "_MODEL_POLLS", 100_000)


def began(seconds: float, metrics: str = VLLM) -> str:
    return f"{metrics}process_start_time_seconds {seconds}\n"


async def test_a_closed_connection_shows_a_restart_between_two_polls() -> None:
    """llama.cpp's server does not say when it began."""
    pages = {"/apply-template": template}
    async with AsyncExitStack() as first:
        running = scripted(GOOD, metrics=LLAMA, pages=pages)
        before = await first.enter_async_context(running)
        config = configured(before, poll_interval=0.3)
        async with gateway_over(config) as (gateway, _):
            one = await probed(gateway)
            assert one.kind == "llama.cpp" and one.capabilities.continues
            polls = one.num_polls
            await until(lambda: one.num_polls > polls)
            await first.aclose()
            later = {"/apply-template": old_template}
            async with scripted(GOOD, port=before.port, metrics=LLAMA, pages=later, models=("n",)):
                assert one.num_polls == polls + 1
                await until(lambda: set(one.models or ()) == {"n"})
                await until(lambda: one.capabilities.continues is False)
                assert not one.num_misses and one.kind == "llama.cpp"


async def test_another_kind_of_engine_at_the_same_address() -> None:
    async with AsyncExitStack() as first:
        before = await first.enter_async_context(scripted(GOOD, metrics=LLAMA))
        config = configured(before, poll_interval=0.1)
        async with gateway_over(config) as (gateway, _):
            one = await probed(gateway)
            await first.aclose()
            pages = {"/get_server_info": {"version": "0.5.9", "max_running_requests": 7}}
            async with scripted(GOOD, port=before.port, metrics=SGLANG, pages=pages):
                await until(lambda: one.capabilities.slots == 7)
                assert one.kind == "sglang" and not one.lost_signals


async def test_a_process_that_began_later_is_another() -> None:
    """Where a proxy keeps the connection."""
    async with serving(GOOD, metrics=began(1000.0)) as (engine, gateway, _):
        one = await probed(gateway)
        one.load.prefixes.add([1, 2, 3])
        engine.pages = {"/tokenize": lambda asked: {"count": 3, "max_model_len": 77}}
        for same in (1000.0, 1001.5, 990.0, 1000.0):
            # by another clock, or of another process behind the same address
            engine.metrics = began(same)
            polls = one.num_polls
            await until(lambda polls=polls: one.num_polls > polls + 1)
        assert one.capabilities.contexts == {} and one.share(gateway.now()) == 1.0
        engine.models = ("n",)
        engine.metrics = began(1004.0)
        await until(lambda: set(one.models or ()) == {"n"})
        await until(lambda: one.capabilities.contexts == {"n": 77})
        # and its caches are cold
        assert one.share(gateway.now()) < 1.0 and not one.load.prefixes.matched([1, 2, 3])


async def test_a_proxy_without_an_engine_shows_it_too() -> None:
    pages: dict[str, Any] = {"/metrics": (502, {})}
    async with (
        scripted(GOOD, metrics=PACELINE_METRICS, pages=pages) as engine,
        gateway_over(configured(engine)) as (gateway, _),
    ):
        one = gateway.upstreams.by_name["e1"]
        # nor is it taken for one without metrics
        await until(lambda: one.num_polls > 3)
        assert one.kind == "auto" and one.trouble == "/metrics answers 502"
        del pages["/metrics"]
        await until(lambda: one.kind == "paceline" and not one.trouble)
        await probed(gateway)
        pages["/metrics"] = (503, {})
        await until(lambda: one.is_away)
        engine.models = ("n",)
        pages["/version"] = {"version": "0.2.0"}
        del pages["/metrics"]
        await until(lambda: set(one.models or ()) == {"n"})
        await until(lambda: one.capabilities.version == "0.2.0")


async def test_who_is_not_polled_and_lists_other_models_is_asked_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_MAX_POLL_WAIT", 0.005)
    monkeypatch.setattr(registry, "_MODEL_POLLS", 10)
    listed = {"data": [{"id": "m", "created": 1}]}
    pages: dict[str, Any] = {CHAT: refuses_both, "/v1/models": listed}
    async with scripted(GOOD, pages=pages) as engine:
        config = configured(engine, poll_interval=0.01, **UNPOLLED)
        async with gateway_over(config) as (gateway, _):
            one = await probed(gateway)
            assert one.capabilities.continues
            pages[CHAT] = knows_neither
            # many engines say that their model was made just now
            for moment in (2, 3):
                listed["data"][0]["created"] = moment
                looks = engine.asked.count("/v1/models")
                await until(lambda looks=looks: engine.asked.count("/v1/models") > looks + 1)
            assert one.capabilities.continues and engine.asked.count(CHAT) == 2
            listed["data"][0]["max_model_len"] = 512
            await until(lambda: one.capabilities.continues is False)
            assert engine.asked.count(CHAT) == 4


async def test_one_that_says_less_than_before_has_its_kinds_table() -> None:
    pages: dict[str, Any] = {"/apply-template": old_template}
    async with AsyncExitStack() as first:
        running = scripted(GOOD, metrics=LLAMA, pages=pages)
        before = await first.enter_async_context(running)
        async with gateway_over(configured(before)) as (gateway, _):
            one = await probed(gateway)
            assert not one.facts.continues
            await first.aclose()
            async with scripted(GOOD, port=before.port, metrics=LLAMA):
                await until(lambda: one.facts.continues)
                assert not one.capabilities.answered


async def test_who_closes_every_connection_is_not_asked_all_the_time() -> None:
    async with (
        scripted(GOOD, metrics=LLAMA, closes=True) as engine,
        gateway_over(configured(engine, poll_interval=0.02)) as (gateway, _),
    ):
        one = await probed(gateway)
        since = time.monotonic()
        await until(lambda: one.num_polls > 100, 20.0)
        # at first, at once, after the time of 20 polls, of 40 more, of 80 more
        most = math.log2(1.0 + (time.monotonic() - since) / 0.4)
        assert 3 <= engine.asked.count("/apply-template") <= 3 + most


async def test_what_it_was_asked_by_is_no_sign_of_a_restart() -> None:
    """An engine that answers, and is polled all the time, is asked once."""
    async with (
        scripted(GOOD, metrics=began(1000.0, LLAMA)) as engine,
        gateway_over(configured(engine, poll_interval=0.02)) as (gateway, http),
    ):
        one = await probed(gateway)
        for _ in range(3):
            await http.post(CHAT, json={"model": "m", "messages": [], "stream": True})
        await until(lambda: one.num_polls > 60)
        assert engine.asked.count("/apply-template") == 1
