"""An engine's state in one word, and what metrics and status say of it."""

from __future__ import annotations

import re

import pytest

from paceline.gateway import EngineConfig, GatewayConfig
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.upstreams.state import state_of
from paceline.gateway.upstreams.upstream import Upstream
from paceline.routing import Demand, Pressure
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, chat, configured, gateway_over

DEMAND = Demand(prompt_tokens=100.0, max_tokens=50.0, output_tokens=50.0)


def engine(**fields: object) -> Upstream:
    config = EngineConfig(name="e", url="http://127.0.0.1:1", **fields)  # type: ignore[arg-type]
    made = Upstream(config, GatewayConfig(engines=(config,)), 0.0)
    made.trouble = ""
    return made


def test_each_state_has_its_word() -> None:
    made = engine(max_concurrent=1)
    assert state_of(made, 1.0) == "ready"
    view = made.load.view(DEMAND, 1.0)
    ticket = made.load.dispatch(DEMAND, view, 1.0)
    assert state_of(made, 1.0) == "at_capacity"
    ticket.end(2.0)
    made.load.heard(Pressure(at=2.0, kv=0.99))
    assert state_of(made, 2.0) == "memory_pressure"
    made.back_at = 95.0
    assert state_of(made, 100.0) == "starting" and made.share(100.0) == 0.5
    assert state_of(made, 106.0) == "memory_pressure"
    made.load.pace.slow_since = 100.0
    assert state_of(made, 106.0) == "slow"
    model = made.standings.of("m", 110.0)
    for _ in range(5):
        model.begin(CHAT, 110.0)
        model.end(CHAT, "failed", 110.0)
    assert state_of(made, 111.0) == "failing"
    assert state_of(made, 110.0 + model.reopens_in(CHAT, 110.0) + 0.1) == "half-open"
    model.cool_down(300.0)
    assert state_of(made, 120.0) == "cooling_down" and state_of(made, 111.0) == "failing"
    made.num_misses = 1
    assert state_of(made, 120.0) == "unreachable"
    made.draining = True
    assert state_of(made, 120.0) == "draining"


def told(text: str, name: str, **labels: str) -> float:
    inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    (value,) = re.findall(rf"^{re.escape(f'{name}{{{inside}}}')} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_predictions_are_told_beside_what_came_of_them() -> None:
    made = engine()
    view = made.load.view(DEMAND, 1.0)
    ticket = made.load.dispatch(DEMAND, view, 1.0)
    # a first token counts once
    ticket.first_token(3.0)
    ticket.first_token(9.0)
    made.back_at = 4.0
    text = GatewayMetrics().render([made], 0, 7.0)
    name = "paceline:gateway_"
    assert told(text, f"{name}first_tokens_total", engine="e") == 1
    seconds = f"{name}first_token_seconds_total"
    assert told(text, seconds, engine="e", kind="actual") == 2.0
    assert told(text, seconds, engine="e", kind="predicted") == view.ttft > 0.0
    assert told(text, f"{name}engine_share", engine="e") == pytest.approx(0.3)
    assert told(text, f"{name}engine_slow", engine="e") == 0.0
    made.load.pace.slow_since = 5.0
    assert told(GatewayMetrics().render([made], 0, 7.0), f"{name}engine_slow", engine="e") == 1.0


async def test_status_says_it() -> None:
    step = Step(parts=chat_chunks(["a"]))
    async with (
        scripted(step, metrics=PACELINE_METRICS) as live,
        gateway_over(configured(live, engine_fields={"e1": {"max_concurrent": 3}}), ()) as (
            gateway,
            client,
        ),
    ):
        assert (await client.post(CHAT, json=chat(stream=True))).status_code == 200
        found = (await client.get("/status")).json()["engines"]["e1"]
        assert (found["state"], found["share"], found["slow"]) == ("ready", 1.0, False)
        assert (found["max_concurrent"], found["cooldown_left_s"]) == (3, 0.0)
        gateway.upstreams.by_name["e1"].draining = True
        found = (await client.get("/status")).json()["engines"]["e1"]
        assert found["state"] == "draining"
