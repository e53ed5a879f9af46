"""A model's only engine is picked, and its route found, the same with fast paths and without."""

import random

import pytest

from paceline.errors import UnknownModelError
from paceline.gateway.routing.picker import Pick, Picker
from paceline.gateway.routing.routes import Routes
from paceline.gateway.settings.config import EngineConfig, GatewayConfig
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.errors import HttpError
from paceline.routing import Demand
from paceline.wire import fast_paths

PATH = "/v1/chat/completions"


def made(name: str = "one", **settings: int) -> Upstream:
    config = EngineConfig(name=name, url="http://127.0.0.1:1", **settings)
    engine = Upstream(config, GatewayConfig(engines=(config,)), 0.0)
    engine.lists([{"id": "m", "max_model_len": 100}], {})
    engine.trouble = ""
    return engine


def picked(engine: Upstream, prompt: float) -> Pick | tuple[int, str]:
    routes = Routes(GatewayConfig(engines=(engine.config,)), {"one": engine}, {})
    demand = Demand(prompt, 10, 10, longest_prompt=prompt, least_prompt=prompt / 4)
    try:
        return Picker(random.Random(1)).pick(routes.find("m", prompt, path=PATH), demand, 1.0)
    except HttpError as error:
        return error.status, str(error)


@pytest.mark.parametrize("state", ["well", "draining", "full", "failing", "cooling down"])
@pytest.mark.parametrize("prompt", [10.0, 160.0, 900.0])
def test_a_lone_engine_is_picked_the_same_both_ways(state: str, prompt: float) -> None:
    engine = made(max_concurrent=1) if state == "full" else made()
    if state == "draining":
        engine.drain(on=True, now=0.5)
    elif state == "full":
        engine.load.running.add(object())  # type: ignore[arg-type]
    elif state == "failing":
        engine.breaker.trip(0.5)
    elif state == "cooling down":
        engine.standings.of("m", 0.5).cool_down(9.0)
    fast = picked(engine, prompt)
    with fast_paths.turned_off():
        assert picked(engine, prompt) == fast
    assert isinstance(fast, Pick) == (state in ("well", "full", "failing") and prompt < 400.0)


def test_a_route_is_found_once_until_an_engine_lists_its_models_again() -> None:
    engine, upstreams = made(), {}
    upstreams["one"] = engine
    routes = Routes(GatewayConfig(engines=(engine.config,)), upstreams, {})
    first = routes.find("m", 1.0, path=PATH)
    assert routes.find("m", 1.0, path=PATH) is first
    assert routes.find("m", 1.0, path="/v1/completions").path == "/v1/completions"
    upstreams["two"] = made("two")
    both = routes.find("m", 1.0, path=PATH)
    assert [each.upstream.name for each in both.tiers[0]] == ["one", "two"]
    del upstreams["two"]
    assert routes.find("m", 1.0, path=PATH) == first
    engine.lists([{"id": "other"}], {})
    with pytest.raises(UnknownModelError):
        routes.find("m", 1.0, path=PATH)


def test_a_route_with_many_engines_is_kept_again_after_each_refresh() -> None:
    upstreams = {name: made(name) for name in map("e{}".format, range(40))}
    routes = Routes(GatewayConfig(engines=(upstreams["e0"].config,)), upstreams, {})
    for _ in range(2):
        first = routes.find("m", 1.0, path=PATH)
        assert len(first.one_of_each) == 1, "not each engine is asked what it serves"
        assert routes.find("m", 1.0, path=PATH).tiers is first.tiers
        routes.refresh()
