"""Early start of the large model while a prefix is held."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gateway.cascade.gate import PrefixGate
from paceline.routing.engine_load import Pressure
from tests.gateway.cascade.helpers import calibration, cascade, said, told
from tests.gateway.cascade.test_cascade import SURE, UNSURE, asked, by, metric
from tests.gateway.fault_server import Step
from tests.gateway.helpers import CHAT, is_clean, refused, streamed, text_of, until

NAME = "paceline:gateway_cascade_early_total"
MANY: dict[str, Any] = {"mode": "prefix", "early_prefill": 1.0}


async def test_the_large_model_has_begun_once_the_prefix_is_thrown_away(tmp_path: Path) -> None:
    # the small model's first token comes only once the large one was asked
    small, large = told(["a", "b"], *UNSURE, gap=0.2), told(["lar", "ge"])
    async with cascade(small, large, calibration=calibration(tmp_path), **MANY) as (
        _, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0
        response = await http.post(CHAT, json=asked(stream=True))
        events = streamed(response)
        assert text_of(events) == "large" and by(response) == "escalated"
        assert len(two.bodies) == 1 and gateway.hedges.left == pytest.approx(0.0)
        assert len(response.headers.get_list("x-paceline-cascade")) == 1
        # what was decided is told, though the request was sent before that
        assert events[-2]["paceline"]["cascade"]["why"] == "score"
        assert response.headers["x-paceline-engine"] == "e2"
        text = (await http.get("/metrics")).text
        assert metric(text, NAME, model="chat", result="used") == 1
        await until(lambda: is_clean(gateway))
        # the budget is spent
        messages = [{"role": "user", "content": "again"}]
        await http.post(CHAT, json=asked(stream=True, messages=messages))
        text = (await http.get("/metrics")).text
        assert metric(text, NAME, model="chat", result="used") == 1


async def test_what_is_not_wanted_is_cut(tmp_path: Path) -> None:
    small = told(["a", "b", "c"], *SURE, -0.1, gap=0.2)
    large = Step(parts=told(["lar", "ge"]).parts[:1], then="stall")
    async with cascade(small, large, calibration=calibration(tmp_path), **MANY) as (
        _, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0
        response = await http.post(CHAT, json=asked(stream=True))
        assert text_of(streamed(response)) == "abc" and by(response) == "small"
        await until(lambda: two.hung_up == 1 and is_clean(gateway))
        text = (await http.get("/metrics")).text
        assert metric(text, NAME, model="chat", result="wasted") == 1


async def test_what_is_not_wanted_is_cut_before_the_caller_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, let_through = asyncio.Event(), PrefixGate.open

    async def to_a_slow_reader(gate: PrefixGate, *told: Any) -> None:
        await reads.wait()
        await let_through(gate, *told)

    monkeypatch.setattr(PrefixGate, "open", to_a_slow_reader)
    small = told(["a", "b", "c"], *SURE, -0.1, gap=0.2)
    large = Step(parts=told(["lar", "ge"]).parts[:1], then="stall")
    async with cascade(small, large, calibration=calibration(tmp_path), **MANY) as (
        _, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0
        request = asyncio.ensure_future(http.post(CHAT, json=asked(stream=True)))
        await until(lambda: two.hung_up == 1)
        assert not request.done()
        reads.set()
        assert text_of(streamed(await request)) == "abc"
        await until(lambda: is_clean(gateway))


@pytest.mark.parametrize("early", [True, False])
async def test_a_request_of_both_models_is_one_in_flight(tmp_path: Path, early: bool) -> None:
    small = told(["a", "b"], *UNSURE, gap=0.2) if early else replace(said("a", -5.0), delay=0.2)
    fields = {**MANY, "shadow": 1.0} if early else {}
    large = told(["lar", "ge"], gap=0.2)
    async with cascade(small, large, calibration=calibration(tmp_path), **fields) as (
        one, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0

        async def in_flight() -> int:
            found: int = (await http.get("/status")).json()["in_flight"]
            return found

        request = asyncio.ensure_future(http.post(CHAT, json=asked(stream=True)))
        await until(lambda: one.bodies and (two.bodies or not early))
        assert await in_flight() == 1
        await until(lambda: two.bodies)
        assert await in_flight() == 1
        assert by(await request) == "escalated"
        # a comparison is for no caller
        await until(lambda: gateway.in_flight == 0)
        assert not early or len(gateway.cascades._shadows._running) == 1


@pytest.mark.parametrize("small", ["unsure", "refusal", "dead"])
async def test_a_large_model_that_cannot_be_had_early_is_as_one_later(
    tmp_path: Path, small: str
) -> None:
    step = {
        "unsure": told(["a", "b"], *UNSURE, gap=0.1),
        "refusal": told(["sorry", ", no"], *SURE, gap=0.1),
        "dead": refused(503),
    }[small]
    async with cascade(step, refused(503), calibration=calibration(tmp_path), **MANY) as (
        _, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0
        response = await http.post(CHAT, json=asked(stream=True))
        if small == "unsure":
            assert text_of(streamed(response)) == "ab" and by(response) == "small"
            assert 'why="large unavailable"' in response.headers["x-paceline-cascade"]
        else:
            assert response.status_code == 503
        assert two.bodies
        await until(lambda: is_clean(gateway))


@pytest.mark.parametrize("why", ["far", "budget", "full", "forbidden"])
async def test_it_begins_late_where_it_is_not_worth_it(tmp_path: Path, why: str) -> None:
    small = told(["a", "b", "c"], *SURE, -0.1, gap=0.1)
    more = {**MANY, "early_prefill": 0.001 if why == "far" else 1.0}
    async with cascade(small, told(["x"]), calibration=calibration(tmp_path), **more) as (
        _, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 0.5 if why == "budget" else 5.0
        if why == "full":
            load = gateway.upstreams.by_name["e2"].load
            load.pressure = Pressure(at=gateway.now(), kv=0.9)
        headers = {"x-paceline-allow": "cascade"} if why == "forbidden" else {}
        response = await http.post(CHAT, json=asked(stream=True), headers=headers)
        assert by(response) == "small" and not two.bodies
        await until(lambda: is_clean(gateway))


async def test_a_caller_that_hangs_up_ends_both(tmp_path: Path) -> None:
    slow = Step(parts=told(["a", "b"]).parts[:1], then="stall")
    large = Step(parts=told(["x", "y"]).parts[:1], then="stall")
    async with cascade(slow, large, calibration=calibration(tmp_path), **MANY) as (
        one, two, gateway, http,
    ):  # fmt: skip
        gateway.hedges._saved = 1.0
        with pytest.raises(httpx.ReadTimeout):
            await http.post(CHAT, json=asked(stream=True), timeout=0.5)
        await until(lambda: one.hung_up == 1 and two.hung_up == 1 and is_clean(gateway))


@pytest.mark.parametrize("why", [b"no", b"no logprobs"])
async def test_where_the_small_model_has_no_first_token_no_model_is_asked_twice_at_once(
    tmp_path: Path, why: bytes
) -> None:
    stalls = Step(parts=told(["x", "y"]).parts[:1], then="stall")
    refusal = Step(status=400, parts=(why,), stream=False, delay=0.3)
    async with cascade(
        (refusal, stalls), stalls, calibration=calibration(tmp_path), **MANY
    ) as (one, two, gateway, http):  # fmt: skip
        gateway.hedges._saved = 1.0
        request = asyncio.ensure_future(http.post(CHAT, json=asked(stream=True)))
        # the early request is cut although the one that follows goes on
        await until(lambda: two.hung_up == 1)
        await until(lambda: len(one.bodies) + len(two.bodies) == 3)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: is_clean(gateway))
