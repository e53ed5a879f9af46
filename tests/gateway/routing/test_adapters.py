"""An engine that has an adapter in memory comes before those that would have to load it."""

from __future__ import annotations

import random

from paceline.gateway.routing.picker import Picker
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.config import EngineConfig, GatewayConfig
from paceline.gateway.upstreams.upstream import Upstream
from paceline.routing import Demand

DEMAND = Demand(prompt_tokens=100, max_tokens=10, output_tokens=10)


def made(status: str, seconds: object = 0.3, name: str = "") -> Upstream:
    config = EngineConfig(name=name or status, url="http://127.0.0.1:1")
    engine = Upstream(config, GatewayConfig(engines=(config,)), 0.0)
    entry = {"id": "sql", "status": status, "load_seconds": seconds}
    engine.lists([{"id": "m"}, entry], {})
    return engine


def chosen(*engines: Upstream) -> set[str]:
    """Engines that 20 requests for the adapter would be sent to."""
    picker = Picker(random.Random(1))
    endpoints = [Endpoint(engine, "sql", 0) for engine in engines]
    return {picker._choose(endpoints, DEMAND, 1.0, ()).endpoint.upstream.name for _ in range(20)}


def test_the_load_is_part_of_the_predicted_time() -> None:
    cold, warm = made("registered"), made("resident")
    assert (cold.load_seconds("sql"), warm.load_seconds("sql")) == (0.3, 0.0)
    assert cold.load_seconds("m") == cold.load_seconds("unknown") == 0.0
    assert chosen(cold, warm) == chosen(warm, cold) == {"resident"}
    # it is no hard rule: far more work ahead costs more than a load
    warm.load.prefill_tokens += 1e6
    assert chosen(cold, warm) == {"registered"}
    # also where there is no choice: what is predicted is compared with what is measured
    view = Picker(random.Random(1))._choose([Endpoint(cold, "sql", 0)], DEMAND, 1.0, ()).view
    assert view.ttft == cold.load.view(DEMAND, 1.0).ttft + 0.3


def test_a_request_that_was_sent_has_its_engine_load_the_adapter_once() -> None:
    cold, other = made("registered"), made("registered", name="other")
    other.note_load("sql")
    assert other.load_seconds("sql") == 0.0
    assert chosen(cold, other) == {"other"}
    # the next list says what is there
    other.lists([{"id": "sql", "status": "registered", "load_seconds": 0.2}], {})
    assert other.load_seconds("sql") == 0.2


def test_what_an_engine_says_of_its_loads_is_not_believed_blindly() -> None:
    for strange in (-1, 1e9, float("nan"), "2", None):
        assert made("registered", strange).load_seconds("sql") == 0.1


def test_one_of_several_models_that_is_not_in_memory_costs_its_load_too() -> None:
    def of(value: str, seconds: object = 2.5) -> Upstream:
        engine = made("", name=value)
        status = {"value": value, "load_seconds": seconds}
        engine.lists([{"id": "sql", "status": status}], {})
        return engine

    assert [of(value).load_seconds("sql") for value in ("known", "unloaded", "loading")] == [
        2.5
    ] * 3
    assert of("ready").load_seconds("sql") == of("draining").load_seconds("sql") == 0.0
    assert of("unloaded", "soon").load_seconds("sql") == 0.1
    # llama-server's router has no seconds
    assert of("loaded", None).load_seconds("sql") == 0.0
    assert chosen(of("unloaded"), of("ready")) == {"ready"}
    assert chosen(of("unloaded"), of("failed")) == {"unloaded"}
