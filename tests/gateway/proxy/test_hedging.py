"""A second engine for a late first token, and engines that are slow or have just come back."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    pieces,
    refused,
    serving,
    streamed,
    text_of,
    until,
)

LATE = replace(GOOD, delay=5.0)
# its role comes at once, and its first word does not
ROLE_ONLY = Step(parts=chat_chunks(WORDS)[:1], then="stall")
HEDGED: dict[str, Any] = {"hedge_share": 0.5, "hedge_after": 0.1, "liveness_timeout": 30.0}
QUIET: dict[str, Any] = {"poll_interval": 30.0, "liveness_timeout": 30.0}
OTHER = Step(parts=chat_chunks(WORDS, created=2))


def _known(gateway: Any, first: str = "e1") -> None:
    """Both engines have answered often, in a moment; the first one is chosen."""
    for engine in gateway.upstreams.by_name.values():
        for _ in range(64):
            engine.load.latency.saw_first(10.0, 0, 0.0, 0.02)
    for name in gateway.upstreams.by_name:
        if name != first:
            # slower to its end, so it is the second choice
            gateway.upstreams.by_name[name].load.latency._next.weights[0] *= 2.0
    gateway.hedges._saved = 5.0


@pytest.mark.parametrize("first", [LATE, ROLE_ONLY], ids=["nothing", "a role"])
async def test_a_late_first_token_comes_from_another_engine(first: Step) -> None:
    async with (
        scripted(first, metrics=PACELINE_METRICS) as late,
        scripted(OTHER, metrics=PACELINE_METRICS) as quick,
        gateway_over(configured(late, quick, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        began = time.monotonic()
        answer = await client.post(CHAT, json=chat(stream=True))
        told = streamed(answer)
        assert text_of(told) == "".join(WORDS) and told[-1] == "[DONE]"
        assert 0.1 <= time.monotonic() - began < 3.0
        # one head, one role, from either engine, and a header about it
        assert len({chunk["id"] for chunk in told[:-1]}) == 1
        assert answer.text.count('"role"') == 1
        (note,) = [chunk["paceline"] for chunk in told[:-1] if "paceline" in chunk]
        assert note == {"hedged": True, "engine": "e2", "attempts": 2}
        if first is LATE:
            assert answer.headers["x-paceline-hedged"] == "true"
            assert answer.headers["x-paceline-engine"] == "e2"
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_hedges_total{engine="e2",result="won"} 1.0' in metrics
        # the other one is told to stop, and is not blamed
        state = gateway.upstreams.by_name["e1"]
        await until(lambda: not state.running and not state.load.running)
        assert state.breaker_state(gateway.now()) == "closed"
        assert len(late.bodies) == len(quick.bodies) == 1


async def test_the_first_one_may_be_sooner_after_all() -> None:
    async with (
        scripted(replace(GOOD, delay=0.3), metrics=PACELINE_METRICS) as late,
        scripted(ROLE_ONLY, metrics=PACELINE_METRICS) as later,
        gateway_over(configured(late, later, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert answer.headers["x-paceline-engine"] == "e1" and len(later.bodies) == 1
        await until(lambda: later.hung_up == 1)
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_hedges_total{engine="e2",result="lost"} 1.0' in metrics


@pytest.mark.parametrize("fails", ["first", "second"])
async def test_one_of_both_may_fail(fails: str) -> None:
    dies = replace(refused(503), delay=0.3)
    good = replace(OTHER, delay=0.4)
    async with (
        scripted(
            dies if fails == "first" else replace(GOOD, delay=0.4), metrics=PACELINE_METRICS
        ) as one,
        scripted(good if fails == "first" else refused(500), metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        wanted = "e2" if fails == "first" else "e1"
        assert answer.headers["x-paceline-engine"] == wanted
        assert (len(one.bodies), len(two.bodies)) == (1, 1)
        assert all(not e.running for e in gateway.upstreams.by_name.values())


async def test_a_second_engine_that_asks_for_a_pause_gets_one() -> None:
    async with (
        scripted(replace(GOOD, delay=0.3), metrics=PACELINE_METRICS) as one,
        scripted(refused(429, retry_after="7"), metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.headers["x-paceline-engine"] == "e1" and len(two.bodies) == 1
        cooldowns = {
            n: e.cooldown_left(gateway.now()) for n, e in gateway.upstreams.by_name.items()
        }
        assert 5.0 < cooldowns["e2"] <= 7.0 and cooldowns["e1"] == 0.0
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_hedges_total{engine="e2",result="failed"} 1.0' in metrics


@pytest.mark.parametrize(
    ("first", "status", "wait"),
    # the refusal of the engine that was asked first is the answer, as without a hedge; where that
    # one said nothing, the pause that the second one asked for is told
    [(refused(429, retry_after="50"), 429, "50"), (Step(raw=b""), 503, "40")],
    ids=["refuses", "dies"],
)
async def test_where_both_fail_the_pause_is_told(first: Step, status: int, wait: str) -> None:
    async with (
        scripted(replace(first, delay=0.3), metrics=PACELINE_METRICS) as a,
        scripted(refused(503, retry_after="40"), metrics=PACELINE_METRICS) as b,
        gateway_over(configured(a, b, max_attempts=2, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True))
        # one that closes a connection that was used before is asked once more on a new one
        assert (len(a.bodies), len(b.bodies)) == (1 if status == 429 else 2, 1)
        assert (answer.status_code, answer.headers["retry-after"]) == (status, wait)
        assert 35.0 < gateway.upstreams.by_name["e2"].cooldown_left(gateway.now()) <= 40.0


class _NoConnection:
    """In place of an engine's pool, whose engine takes no connection and refuses none."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def free(self) -> None:
        return None

    async def connect(self) -> Any:
        self.num_asked += 1
        await asyncio.Event().wait()


async def test_a_connection_that_is_late_is_a_late_first_token() -> None:
    fields = {**HEDGED, "poll_interval": 30.0}
    async with (
        scripted(GOOD, metrics=PACELINE_METRICS) as one,
        scripted(OTHER, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **fields)) as (gateway, client),
    ):
        _known(gateway)
        state: Any = gateway.upstreams.by_name["e1"]
        state.pool = _NoConnection(state.pool)
        long = [{"role": "user", "content": "word " * 200}]
        answer = await client.post(CHAT, json=chat(stream=True, messages=long))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert answer.headers["x-paceline-engine"] == "e2" and state.pool.num_asked == 1
        assert not one.bodies and not state.running and not state.load.running
        # what went nowhere is not taken for what it has in its cache, and what was won is
        held = [len(e.load.prefixes) for e in gateway.upstreams.by_name.values()]
        assert held[0] == 0 and held[1] > 0


async def test_who_hangs_up_while_a_connection_is_made_is_seen() -> None:
    async with (
        scripted(GOOD, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, **QUIET)) as (gateway, client),
    ):
        state: Any = gateway.upstreams.by_name["e1"]
        state.pool = _NoConnection(state.pool)
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: state.pool.num_asked == 1)
        sent.cancel()
        await until(lambda: gateway.in_flight == 0)
        assert not state.running and not state.load.running


FULL = PACELINE_METRICS.replace("usage_perc 0.1", "usage_perc 0.8")
SILENT = "paceline:ready 1.0\n"


@pytest.mark.parametrize(
    ("why", "metrics", "fields", "asked"),
    [
        ("it is off", PACELINE_METRICS, {"hedge_share": 0.0}, {}),
        ("the pool is full", FULL, {}, {}),
        ("how full it is, it does not say", SILENT, {}, {}),
        ("work that can wait", PACELINE_METRICS, {}, {"slo": "batch"}),
        ("several choices", PACELINE_METRICS, {}, {"n": 2}),
        ("a long prompt", PACELINE_METRICS, {}, {"user": "x" * 10, "messages": "long"}),
        ("attempts are used up", PACELINE_METRICS, {"max_attempts": 1}, {}),
        ("the budget is empty", PACELINE_METRICS, {"retry_share": 0, "retries_per_second": 0}, {}),
        ("the caller forbids it", PACELINE_METRICS, {}, {"allow": "retry, fallback, resume"}),
        ("it is above the share", PACELINE_METRICS, {"hedge_below": 0.05}, {}),
    ],
)
async def test_when_none_is_sent(
    why: str, metrics: str, fields: dict[str, Any], asked: dict[str, Any]
) -> None:
    body = {key: value for key, value in asked.items() if key != "allow"}
    if body.get("messages") == "long":
        body["messages"] = [{"role": "user", "content": "word " * 5000}]
    headers = {"x-paceline-allow": asked["allow"]} if "allow" in asked else {}
    late = replace(GOOD, delay=0.2)
    async with (
        scripted(late, metrics=metrics) as one,
        scripted(OTHER, metrics=metrics) as two,
        gateway_over(configured(one, two, **{**HEDGED, "hedge_after": 0.05, **fields})) as (
            gateway,
            client,
        ),
    ):
        _known(gateway)
        await client.post(CHAT, json=chat(stream=True, **body), headers=headers)
        assert "gateway_hedges_total{" not in (await client.get("/metrics")).text, why


async def test_hedges_are_a_share_of_the_requests() -> None:
    async with (
        scripted(replace(GOOD, delay=0.25), metrics=PACELINE_METRICS) as one,
        scripted(replace(OTHER, delay=0.25), metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **{**HEDGED, "hedge_share": 0.2})) as (gateway, client),
    ):
        _known(gateway)
        gateway.hedges._saved = 0.0
        for engine in gateway.upstreams.by_name.values():
            engine.load.latency.late_factor = lambda: 1.0  # type: ignore[method-assign]
        sent = [client.post(CHAT, json=chat(stream=True)) for _ in range(10)]
        await asyncio.gather(*sent)
        assert len(one.bodies) + len(two.bodies) <= 12


async def test_a_hedge_stays_in_its_tier_and_in_the_house() -> None:
    model = ModelConfig(name="m", tiers=(("e1:m",), ("e2:m",)))
    async with (
        scripted(replace(GOOD, delay=0.3), metrics=PACELINE_METRICS) as one,
        scripted(OTHER, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, models=(model,), **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        await client.post(CHAT, json=chat(stream=True))
        assert len(one.bodies) == 1 and not two.bodies


async def test_after_a_hedge_has_won_its_stream_can_still_be_resumed() -> None:
    rest = Step(parts=chat_chunks(WORDS[2:], first_id=2))
    async with (
        scripted(LATE, rest, metrics=PACELINE_METRICS) as late,
        scripted(pieces(2), metrics=PACELINE_METRICS) as dies,
        gateway_over(configured(late, dies, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "".join(WORDS)
        assert len(dies.bodies) == 1
        assert late.bodies[1]["resume_output_ids"] == [0, 1]
        (note,) = [chunk["paceline"] for chunk in told[:-1] if "paceline" in chunk]
        assert note["hedged"] and note["resumed"] == 1 and note["attempts"] == 3


async def test_a_caller_who_hangs_up_ends_both() -> None:
    async with (
        scripted(ROLE_ONLY, metrics=PACELINE_METRICS) as one,
        scripted(ROLE_ONLY, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **HEDGED)) as (gateway, client),
    ):
        _known(gateway)
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: len(one.bodies) + len(two.bodies) == 2)
        sent.cancel()
        await until(lambda: one.hung_up + two.hung_up == 2)
        assert all(not e.load.running for e in gateway.upstreams.by_name.values())


@pytest.mark.parametrize(("factor", "few"), [(3.0, True), (0.0, False)])
async def test_slow_factor(factor: float, few: bool) -> None:
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as one,
        scripted(WHOLE, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, slow_factor=factor)) as (gateway, client),
    ):
        state = gateway.upstreams.by_name["e1"].load
        for load in (state, gateway.upstreams.by_name["e2"].load):
            for _ in range(60):
                load.pace.saw(0.1, 0.1)
        for _ in range(20):
            state.pace.saw(1.0, 0.1)
        # answers that are not streamed teach nothing, so both look alike but for that
        for _ in range(80):
            await client.post(CHAT, json=chat())
        assert (len(one.bodies) < 24) == few and len(one.bodies) > 0


@pytest.mark.parametrize(("seconds", "few"), [(60.0, True), (0.0, False)])
async def test_slow_start(seconds: float, few: bool) -> None:
    async with (
        scripted(WHOLE, metrics=PACELINE_METRICS) as one,
        scripted(WHOLE, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, slow_start=seconds)) as (gateway, client),
    ):
        for on in (True, False):
            gateway.upstreams.by_name["e1"].drain(on=on, now=gateway.now())
        for _ in range(80):
            await client.post(CHAT, json=chat())
        assert (len(one.bodies) < 24) == few and len(two.bodies) >= 20


async def test_a_second_engine_that_cannot_be_asked_is_not() -> None:
    odd = [{"role": "nobody", "content": "hi"}]
    fields = {"e2": {"models": ("m",), "max_concurrent": 4}}
    async with (
        scripted(replace(GOOD, delay=0.3), metrics=PACELINE_METRICS) as one,
        scripted(OTHER) as two,
        gateway_over(
            configured(
                one, two, kinds={"e2": "anthropic"}, engine_fields=fields, retry_share=3.0,
                retries_per_second=0.0, **HEDGED,
            )
        ) as (gateway, client),
    ):  # fmt: skip
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True, messages=odd))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert len(one.bodies) == 1 and not two.bodies
        # and it is not paid for: of the three attempts and five hedges that there were
        assert gateway.budget.left(gateway.now()) > 2.2 and gateway.hedges.left == 5.0


async def test_a_second_engine_that_answers_whole_has_answered() -> None:
    async with serving(LATE, WHOLE, metrics=PACELINE_METRICS, **HEDGED) as (_, _, gateway, client):
        _known(gateway)
        began = time.monotonic()
        answer = await client.post(CHAT, json=chat(stream=True))
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert answer.headers["x-paceline-engine"] == "e2" and time.monotonic() - began < 3.0
        metrics = (await client.get("/metrics")).text
        assert 'paceline:gateway_hedges_total{engine="e2",result="won"} 1.0' in metrics
        assert "gateway_attempt_failures_total{" not in metrics
        # the other one is told to stop, and is not blamed
        await until(lambda: is_clean(gateway))
        assert gateway.upstreams.by_name["e1"].breaker_state(gateway.now()) == "closed"
