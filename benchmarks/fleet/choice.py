"""Processor time of a choice among many engines: from a model's name to the engine that is sent the
request, with the routes of the gateway and what it knows of each engine."""

from __future__ import annotations

import random
import time
from statistics import median

from paceline.gateway.requests.body import read_body
from paceline.gateway.routing.picker import Picker
from paceline.gateway.routing.routes import Routes
from paceline.gateway.settings.config import EngineConfig, GatewayConfig, ModelConfig
from paceline.gateway.upstreams.upstream import Upstream, UpstreamModel
from paceline.routing import Demand, Pressure

__all__ = ["choice_ms"]

_PATH = "/v1/chat/completions"
# requests a second of the virtual clock
_RATE = 1000.0
_RUNNING_PER_ENGINE = 4


def choice_ms(count: int, choices: int = 2000, seed: int = 0) -> float:
    """Return the milliseconds of processor time of a choice among ``count`` engines: the median of
    ten groups. Each has run requests, and half the prompts begin as one of fifty others."""
    draw = random.Random(seed)
    names = [f"e{number}" for number in range(count)]
    config = GatewayConfig(
        engines=tuple(EngineConfig(name=name, url=f"http://{name}:8000") for name in names),
        models=(ModelConfig(name="m", tiers=(tuple(names),)),),
    )
    upstreams = {each.name: Upstream(each, config, 0.0) for each in config.engines}
    for upstream in upstreams.values():
        upstream.has_models({"m": UpstreamModel("m", 8192)})
        upstream.load.heard(Pressure(0.0, 0.0, 2.0, 0.3, 100_000.0, 0.0, 0.0))
    body = read_body(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    routes, picker, now = Routes(config, upstreams, {}), Picker(draw, 3.0), 0.0
    groups: list[float] = []
    # engines are known once each has had enough first tokens to be judged
    for _ in range(45):
        for upstream in upstreams.values():
            demand = Demand(200.0, 100.0, 100.0)
            dispatch = upstream.load.dispatch(demand, upstream.load.view(demand, now), now)
            dispatch.first_token(now + draw.uniform(0.04, 0.06))
            dispatch.end(now + 1.0, 20)
    dispatches = []
    for number in range(choices):
        now += 1.0 / _RATE
        if number % round(0.1 * _RATE) == 0:
            # as the gateway does ten times a second
            routes.refresh()
        chain = tuple(hash((draw.randrange(50), run)) for run in range(8)) if number % 2 else ()
        demand = Demand(500.0, 200.0, 100.0, prefix=chain)
        began = time.process_time()
        route = routes.find("m", 500.0, path=_PATH).serving(_PATH, body)
        pick = picker.pick(route, demand, now)
        load = pick.endpoint.upstream.load
        dispatches.append(load.dispatch(demand, pick.view, now))
        groups.append(time.process_time() - began)
        load.prefixes.add(chain)
        if len(dispatches) > _RUNNING_PER_ENGINE * count:
            dispatches.pop(0).end(now, 20)
    size = choices // 10
    return 1e3 * median(sum(groups[at : at + size]) / size for at in range(0, choices, size))
