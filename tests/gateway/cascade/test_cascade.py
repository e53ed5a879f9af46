"""A model with a cascade: who answers, and what the caller is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import ConfigError
from paceline.gateway import Gateway
from paceline.gateway.cascade.asked import NO_CASCADES
from paceline.gateway.settings.calibration import digest_of
from paceline.gateway.settings.cascade import CascadeConfig, UnderLoad
from paceline.gateway.settings.config import KeyConfig, ModelConfig, PriceConfig
from paceline.http.keys import ApiKey, KeyRing
from tests.gateway.cascade.helpers import calibration, cascade, said, told
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import (
    CHAT,
    chat,
    configured,
    gateway_over,
    is_clean,
    refused,
    streamed,
    text_of,
    until,
)

SURE, UNSURE = (-0.1, -0.2), (-3.0, -0.2)
LARGE = said("large")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PRICES = (
    PriceConfig(engine="e1", input=1, output=1),
    PriceConfig(engine="e2", input=100, output=100),
)


def asked(**fields: Any) -> dict[str, Any]:
    return chat(**{"model": "chat", **fields})


def by(response: httpx.Response) -> str:
    return response.headers["x-paceline-cascade"].split(";")[0]


def content(response: httpx.Response) -> str:
    answer = response.json()
    found: str = answer["choices"][0]["message"]["content"]
    return found


def metric(text: str, name: str, **labels: str) -> float:
    wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    line = next(line for line in text.splitlines() if line.startswith(f"{name}{{{wanted}}}"))
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_small_answer_is_sent_where_it_is_sure(tmp_path: Path, stream: bool) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *SURE), LARGE, calibration=path) as (one, two, gateway, http):
        response = await http.post(CHAT, json=asked(stream=stream))
        # the caller asked for no log-probabilities, and for no other model's name
        assert one.bodies[0]["logprobs"] is True and one.bodies[0]["top_logprobs"] == 5
        assert not one.bodies[0].get("stream") and not two.bodies
        header = response.headers["x-paceline-cascade"]
        assert header.startswith('small; model="small"; why="score"; score=0.9')
        assert response.headers["x-paceline-engine"] == "e1"
        if stream:
            events = streamed(response)
            assert text_of(events) == "small" and events[-1] == "[DONE]"
            note = events[-2]["paceline"]["cascade"]
            assert {event["model"] for event in events[:-1]} == {"chat"}
            assert response.headers["content-type"].startswith("text/event-stream")
        else:
            answer = response.json()
            note = answer["paceline"]["cascade"]
            assert content(response) == "small" and answer["model"] == "chat"
            assert answer["choices"][0]["logprobs"] is None
        assert note["by"] == "small" and note["score"] > 0.9 > note["threshold"] > 0.4
        await until(lambda: is_clean(gateway))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("small", "fields", "why"),
    [
        (said("small", *UNSURE), {}, "score"),
        (said("I'm sorry, I can't.", *SURE), {}, "refusal"),
        (said("cut", *SURE, reason="length"), {}, "length"),
        (said("no json", *SURE), {"response_format": {"type": "json_object"}}, "json"),
        (said("no call", *SURE), {"tools": TOOLS, "tool_choice": "required"}, "tool"),
        (refused(500), {}, "small unavailable"),
        (refused(400), {}, "small unavailable"),
    ],
)
async def test_the_large_model_answers_where_the_small_one_does_not(
    tmp_path: Path, small: Any, fields: dict[str, Any], why: str, stream: bool
) -> None:
    large = told(["lar", "ge"]) if stream else LARGE
    async with cascade(small, large, calibration=calibration(tmp_path)) as (_, two, gateway, http):
        response = await http.post(CHAT, json=asked(stream=stream, **fields))
        assert response.status_code == 200 and by(response) == "escalated"
        assert f'model="chat"; why="{why}"' in response.headers["x-paceline-cascade"]
        assert "logprobs" not in two.bodies[0]
        if stream:
            events = streamed(response)
            assert text_of(events) == "large" and events[-2]["paceline"]["cascade"]["why"] == why
        else:
            assert content(response) == "large"
        await until(lambda: is_clean(gateway))


async def test_a_conversation_goes_up_and_stays_there(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    small = (said("a", *UNSURE), said("b", *SURE))
    async with cascade(small, LARGE, calibration=path, conversation_header="X-Chat") as (
        one, _, _, http,
    ):  # fmt: skip
        first = {"role": "user", "content": "hi"}
        turns = [first, {"role": "assistant", "content": "large"}, {"role": "user", "content": "?"}]
        assert by(await http.post(CHAT, json=asked(messages=[first]))) == "escalated"
        later = await http.post(CHAT, json=asked(messages=turns))
        assert by(later) == "routed" and 'why="conversation"' in later.headers["x-paceline-cascade"]
        assert len(one.bodies) == 1
        # another first question, and the same one in a conversation that has a name
        other = [{"role": "user", "content": "hello"}]
        assert by(await http.post(CHAT, json=asked(messages=other))) == "small"
        named = await http.post(CHAT, json=asked(messages=[first]), headers={"x-chat": "7"})
        assert by(named) == "small"


async def test_without_a_calibration_faults_alone_decide() -> None:
    small = (said("fine"), said(" "), said("fine"))
    async with cascade(small, LARGE) as (one, _, _, http):
        first = await http.post(CHAT, json=asked())
        # nothing would read them
        assert "logprobs" not in one.bodies[0]
        assert by(first) == "small" and "score" not in first.headers["x-paceline-cascade"]
        second = await http.post(CHAT, json=asked())
        assert 'why="empty"' in second.headers["x-paceline-cascade"]


async def test_route_asks_one_model_alone(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    small = (told(["sm", "all"]), refused(503), refused(503), refused(503))
    large = (LARGE, LARGE)
    async with cascade(small, large, calibration=path, mode="route") as (one, two, _, http):
        easy = await http.post(CHAT, json=asked(stream=True))
        assert by(easy) == "routed" and text_of(streamed(easy)) == "small"
        assert streamed(easy)[-2]["paceline"]["cascade"]["model"] == "small"
        assert "logprobs" not in one.bodies[0] and not two.bodies
        hard = await http.post(CHAT, json=asked(messages=[{"role": "user", "content": "why?"}]))
        assert content(hard) == "large" and len(one.bodies) == 1
        assert 'model="chat"; why="score"' in hard.headers["x-paceline-cascade"]
        # the small engine is gone
        lost = await http.post(CHAT, json=asked(messages=[{"role": "user", "content": "again"}]))
        assert content(lost) == "large" and by(lost) == "escalated"


async def test_a_prefix_is_held_back_and_then_flushed_or_thrown_away(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    words = ["a", "b", "c", "d", "e"]
    small = (
        told(words, -0.1, -0.1, -5.0, -5.0, -5.0, gap=0.05),
        told(words, -3.0, -3.0, -0.1, -0.1, -0.1, gap=0.2),
        told(["sorry", ", no"], -0.1, -0.1),
        Step(parts=tuple(p.replace(b"content", b"refusal", 1) for p in told(words).parts), gap=0.2),
    )
    async with cascade(small, told(["large"]), calibration=path, mode="prefix") as (
        one,
        two,
        gateway,
        http,
    ):
        kept = await http.post(CHAT, json=asked(stream=True))
        events = streamed(kept)
        assert text_of(events) == "abcde" and events[-1] == "[DONE]" and by(kept) == "small"
        assert all(choice["logprobs"] is None for e in events[:-1] for choice in e["choices"])
        assert events[-2]["paceline"]["cascade"]["by"] == "small" and not two.bodies
        for text, why in (("second", "score"), ("third", "refusal"), ("4", "refusal")):
            messages = [{"role": "user", "content": text}]
            thrown = await http.post(CHAT, json=asked(stream=True, messages=messages))
            assert text_of(streamed(thrown)) == "large" and by(thrown) == "escalated"
            assert f'why="{why}"' in thrown.headers["x-paceline-cascade"]
        # the streams that were thrown away were cut at the engine
        await until(lambda: one.hung_up == 2 and is_clean(gateway))
        text = (await http.get("/metrics")).text
        wasted = metric(text, "paceline:gateway_cascade_wasted_tokens_total", model="chat")
        assert wasted == 6


@pytest.mark.parametrize("kind", ["log-probabilities", "texts", "thoughts"])
async def test_no_more_tokens_than_the_first_are_held_back(tmp_path: Path, kind: str) -> None:
    words = ["a", "b", "c", "d", "e", "f"]
    parts = told(words, *(SURE * 3 if kind == "log-probabilities" else ())).parts
    if kind == "thoughts":
        parts = tuple(part.replace(b"content", b"reasoning_content", 1) for part in parts)
    slow = Step(parts=parts, gap=0.1, then="stall")
    path = calibration(tmp_path, first=3)
    async with cascade(
        slow, LARGE, calibration=path, mode="prefix", prefix_tokens=3
    ) as (_, _, gateway, http):  # fmt: skip
        async with http.stream("POST", CHAT, json=asked(stream=True)) as response:
            held = await anext(response.aiter_text())
        assert held.count('"delta"') == 3 and by(response) == "small"
        await until(lambda: is_clean(gateway))


async def test_a_prefix_that_breaks_or_is_no_stream_is_no_answer(tmp_path: Path) -> None:
    path = calibration(tmp_path, first=4)
    broken = told(["a", "b", "c", "d", "e"], *[-0.1] * 5)
    small = (
        Step(parts=broken.parts[:2], then="cut"),
        # an engine that does not stream
        said("small", *SURE),
    )
    async with cascade(
        small, told(["large"]), calibration=path, mode="prefix", prefix_tokens=4
    ) as (_, _, gateway, http):
        for text in ("one", "two"):
            messages = [{"role": "user", "content": text}]
            response = await http.post(CHAT, json=asked(stream=True, messages=messages))
            assert text_of(streamed(response)) == "large" and by(response) == "escalated"
            assert 'why="small unavailable"' in response.headers["x-paceline-cascade"]
        await until(lambda: is_clean(gateway))


async def test_an_engine_without_logprobs_is_used_with_the_prompt_alone(tmp_path: Path) -> None:
    no = Step(status=400, parts=(b'{"error":{"message":"unknown field logprobs"}}',), stream=False)
    small = (no, said("small"), said("small"))
    async with cascade(small, LARGE, calibration=calibration(tmp_path)) as (one, _, _, http):
        assert by(await http.post(CHAT, json=asked())) == "small"
        assert ["logprobs" in body for body in one.bodies] == [True, False]
        # from then on the prompt decides before the small model is asked
        hard = await http.post(CHAT, json=asked(messages=[{"role": "user", "content": "why?"}]))
        assert by(hard) == "routed" and content(hard) == "large" and len(one.bodies) == 2
        easy = await http.post(CHAT, json=asked(messages=[{"role": "user", "content": "x"}]))
        assert by(easy) == "small" and "logprobs" not in one.bodies[2]


async def test_a_prefix_without_logprobs_is_asked_for_again(tmp_path: Path) -> None:
    no = Step(status=400, parts=(b'{"error":{"message":"unknown field logprobs"}}',), stream=False)
    small = (no, told(["sm", "all"]), told(["x", "y"]))
    path = calibration(tmp_path)
    async with cascade(small, LARGE, calibration=path, mode="prefix") as (one, two, _, http):
        response = await http.post(CHAT, json=asked(stream=True))
        assert by(response) == "small" and text_of(streamed(response)) == "small"
        hard = asked(messages=[{"role": "user", "content": "why?"}], stream=True)
        assert by(await http.post(CHAT, json=hard)) == "routed" and len(two.bodies) == 1
        assert ["logprobs" in body for body in one.bodies] == [True, False]


@pytest.mark.parametrize("mode", ["cascade", "prefix"])
async def test_one_bad_request_does_not_end_the_scores_of_others(tmp_path: Path, mode: Any) -> None:
    told_why = b'{"error":{"message":"top_logprobs may be at most 8, got 20"}}'
    no = Step(status=400, parts=(told_why,), stream=False)
    good = said("small", *SURE) if mode == "cascade" else told(["sm", "all"], *SURE)
    path = calibration(tmp_path)
    async with cascade((no, no, good), LARGE, calibration=path, mode=mode) as (one, _, _, http):
        bad = await http.post(CHAT, json=asked(stream=True, logprobs=True, top_logprobs=20))
        assert by(bad) == "escalated" and len(one.bodies) == 2
        messages = [{"role": "user", "content": "another"}]
        next_one = await http.post(CHAT, json=asked(stream=True, messages=messages))
        assert by(next_one) == "small" and one.bodies[2]["logprobs"] is True


async def test_an_engine_without_logprobs_is_seen_once_by_its_drift(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small"), LARGE, calibration=path) as (_, _, gateway, http):
        judge = gateway.cascades._judges["chat"]
        judge.asks_logprobs = False
        assert by(await http.post(CHAT, json=asked())) == "small"
        assert judge._scales["route"].drift._num_new == 1


async def test_log_probabilities_that_the_caller_asked_for_stay(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *SURE), LARGE, calibration=path) as (_, _, _, http):
        response = await http.post(CHAT, json=asked(logprobs=True, top_logprobs=1))
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert [len(place["top_logprobs"]) for place in content] == [1, 1]


async def test_a_budget_that_the_large_model_exceeds_leaves_the_small_answer(
    tmp_path: Path,
) -> None:
    more: Any = {"prices": PRICES, "keys": (KeyConfig(name="ann", budget="0.002/day"),)}
    async with cascade(
        said("small", *UNSURE), LARGE, calibration=calibration(tmp_path), gateway=more,
        keys=(ApiKey.of("ann", "user", "k" * 8),),
    ) as (_, two, gateway, http):  # fmt: skip
        ask = asked(max_tokens=20)
        response = await http.post(CHAT, json=ask, headers={"authorization": "Bearer kkkkkkkk"})
        assert by(response) == "small" and content(response) == "small" and not two.bodies
        assert 'why="large unavailable"' in response.headers["x-paceline-cascade"]
        assert gateway.spending.status()["ann"]["spent"] == "0.000015"


@pytest.mark.parametrize("mode", ["route", "cascade", "prefix"])
async def test_a_large_model_that_cannot_be_had_leaves_the_small_one_to_each_turn(
    tmp_path: Path, mode: Any
) -> None:
    path, small = calibration(tmp_path), told(["sm", "all"], *UNSURE)
    if mode == "cascade":
        small = said("small", *UNSURE)
    async with cascade(small, refused(503), calibration=path, mode=mode) as (
        _, two, gateway, http,
    ):  # fmt: skip
        first = {"role": "user", "content": "why?"}
        for turns in ([first], [first, {"role": "assistant", "content": "small"}, first]):
            response = await http.post(CHAT, json=asked(stream=True, messages=turns))
            assert text_of(streamed(response)) == "small"
            assert by(response) == ("routed" if mode == "route" else "small")
            assert 'why="large unavailable"' in response.headers["x-paceline-cascade"]
        assert two.bodies
        await until(lambda: is_clean(gateway))
        # one request is counted once, as what it was
        text = (await http.get("/metrics")).text
        name = "paceline:gateway_cascade_requests_total"
        assert metric(text, name, model="chat", answered_by="small") == 2
        assert text.count(f"\n{name}{{") == 1


@pytest.mark.parametrize("mode", ["route", "cascade"])
async def test_what_the_large_model_finds_wrong_with_a_request_is_passed_on(
    tmp_path: Path, mode: Any
) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *UNSURE), refused(400), calibration=path, mode=mode) as (
        _, _, gateway, http,
    ):  # fmt: skip
        messages = [{"role": "user", "content": "why?"}]
        response = await http.post(CHAT, json=asked(messages=messages))
        assert response.status_code == 400 and "error" in response.json()
        assert response.headers["x-paceline-engine"] == "e2"
        assert len(response.headers.get_list("x-request-id")) == 1
        await until(lambda: is_clean(gateway))


async def test_a_caller_that_stops_the_large_answer_goes_on_with_it(tmp_path: Path) -> None:
    path, large = calibration(tmp_path), told(["a", "b", "c"], gap=0.2)
    async with cascade(said("small", *UNSURE), large, calibration=path) as (_, two, _, http):
        async with http.stream("POST", CHAT, json=asked(stream=True)) as response:
            assert response.status_code == 200
        await until(lambda: two.hung_up == 1)
        again = await http.post(CHAT, json=asked(stream=True))
        assert 'why="conversation"' in again.headers["x-paceline-cascade"]


async def test_both_models_count_against_a_limit_of_tokens(tmp_path: Path) -> None:
    more = {"rate_limit_tokens": "1000/minute"}
    async with cascade(
        said("small", *UNSURE), LARGE, calibration=calibration(tmp_path), gateway=more
    ) as (_, _, gateway, http):
        response = await http.post(CHAT, json=asked(max_tokens=20))
        assert by(response) == "escalated" and content(response) == "large"
        # 15 tokens of each
        assert response.headers["x-ratelimit-remaining-tokens"] == "970"
        await until(lambda: is_clean(gateway))


async def test_what_is_saved_and_handed_off_is_counted(tmp_path: Path) -> None:
    small = (said("small", *SURE), said("small", *UNSURE))
    path, more = calibration(tmp_path), {"prices": PRICES}
    async with cascade(small, LARGE, calibration=path, gateway=more) as (_, _, _, http):
        await http.post(CHAT, json=asked())
        await http.post(CHAT, json=asked())
        text = (await http.get("/metrics")).text
        name = "paceline:gateway_cascade_requests_total"
        assert metric(text, name, model="chat", answered_by="small") == 1
        assert metric(text, name, model="chat", answered_by="escalated") == 1
        # 15 tokens at 99 a million saved, then 15 at 1 a million wasted
        saved = metric(text, "paceline:gateway_cascade_saved", model="chat")
        assert saved == pytest.approx(15 * 98e-6)


async def test_other_traffic_than_the_labels_is_told(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *SURE), LARGE, calibration=path) as (_, _, _, http):
        for number in range(100):
            messages = [{"role": "user", "content": str(number)}]
            await http.post(CHAT, json=asked(messages=messages))
        text = (await http.get("/metrics")).text
        # every score is near 1, and those of the labels are spread evenly
        assert metric(text, "paceline:gateway_cascade_drift", model="chat") > 0.9


async def test_load_moves_the_threshold_and_no_further_than_its_bound(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(
        said("small", -1.15), LARGE, calibration=path, max_loss=0.05,
        under_load=UnderLoad(max_loss=0.2, full_wait=1.0),
    ) as (_, _, gateway, http):  # fmt: skip
        calm = await http.post(CHAT, json=asked())
        assert by(calm) == "escalated"
        threshold = float(calm.headers["x-paceline-cascade"].rsplit("=", 1)[1])
        gateway.upstreams.by_name["e2"].load.latency.first_token = lambda *_: 9.0
        messages = [{"role": "user", "content": "another"}]
        busy = await http.post(CHAT, json=asked(messages=messages))
        eased = float(busy.headers["x-paceline-cascade"].rsplit("=", 1)[1])
        assert by(busy) == "small" and eased < threshold


async def test_what_the_caller_forbids_is_not_done(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *SURE), LARGE, calibration=path) as (one, _, _, http):
        response = await http.post(CHAT, json=asked(), headers={"x-paceline-allow": "retry"})
        assert content(response) == "large" and not one.bodies
        assert 'why="forbidden"' in response.headers["x-paceline-cascade"]
        # several choices have no cascade, and other models have none
        several = await http.post(CHAT, json=asked(n=2))
        assert "x-paceline-cascade" not in several.headers and not one.bodies
        own = await http.post(CHAT, json=asked(model="small"))
        assert "x-paceline-cascade" not in own.headers and content(own) == "small"


async def test_a_caller_that_hangs_up_ends_the_small_request(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    slow = told(["a", "b", "c"], -0.1, -0.1, -0.1, gap=0.3)
    for mode in ("prefix", "cascade"):
        async with cascade(slow, LARGE, calibration=path, mode=mode) as (
            one,
            two,
            gateway,
            http,
        ):
            with pytest.raises(httpx.ReadTimeout):
                await http.post(CHAT, json=asked(stream=True), timeout=0.15)
            await until(lambda: one.hung_up == 1 and is_clean(gateway))
            assert not two.bodies


async def test_a_calibration_of_other_models_is_refused(tmp_path: Path) -> None:
    path = calibration(tmp_path, small="0" * 32)
    async with scripted(said("small")) as engine:
        models = (
            ModelConfig(
                name="chat", tiers=(("e1",),),
                cascade=CascadeConfig(small="small", calibration=path, prefix_tokens=2),
            ),
            ModelConfig(name="small", tiers=(("e1:m",),)),
        )  # fmt: skip
        gateway = Gateway(configured(engine, models=models), KeyRing(()))
        with pytest.raises(ConfigError, match=r"with m of digest 0{32}, and engine e1 has m of"):
            await gateway.start()
        await gateway.close()


def test_a_digest_does_not_follow_what_a_model_does() -> None:
    card = {"id": "m", "owned_by": "paceline", "status": {"value": "unloaded", "requests": 0}}
    # one of several models has no digest before it was in memory
    assert digest_of(card) == digest_of(card | {"status": {"value": "loading"}}) == ""
    loaded = card | {"digest": "d"}
    assert digest_of(loaded) == digest_of(loaded | {"status": {"value": "running"}}) != ""


async def test_a_model_that_is_replaced_under_way_is_not_judged(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small", *SURE), LARGE, calibration=path) as (_, _, gateway, http):
        upstream = gateway.upstreams.by_name["e1"]
        digest = upstream.models["m"]
        # as if it had been calibrated with what runs now
        again = calibration(tmp_path, small=digest_of(digest.entry))
        config = gateway.config
        await gateway.reload(config, gateway.keys)
        assert again == path and by(await http.post(CHAT, json=asked())) == "small"
        upstream.lists([{"id": "m", "quantization": "q4"}], {})
        response = await http.post(CHAT, json=asked())
        assert content(response) == "large"
        assert 'why="calibration"' in response.headers["x-paceline-cascade"]


async def test_requests_at_once_are_decided_each_by_itself(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    small = (said("small", *SURE), said("small", *UNSURE)) * 8
    async with cascade(small, LARGE, calibration=path) as (_, _, gateway, http):
        asks = [
            http.post(CHAT, json=asked(messages=[{"role": "user", "content": str(n)}]))
            for n in range(16)
        ]
        found = [(by(r), content(r)) for r in await asyncio.gather(*asks)]
        assert sorted(found) == [("escalated", "large")] * 8 + [("small", "small")] * 8
        await until(lambda: is_clean(gateway))
        status = json.loads((await http.get("/status")).content)
        assert status["in_flight"] == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_requests_of_other_models_meet_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a request without a cascade met one")

    for name in ("Run", "read_prompt", "_is_stored"):
        monkeypatch.setattr(f"paceline.gateway.cascade.runner.{name}", never)
    calibrated = calibration(tmp_path)
    async with cascade(said("own"), LARGE, calibration=calibrated, shadow=1.0) as (one, _, _, http):
        body = {"model": "small", "prompt": "hi"} if path != CHAT else asked(model="small")
        response = await http.post(path, json=body)
        assert response.status_code == 200 and len(one.bodies) == 1
        # the names are those that a cascade has
        if path == CHAT:
            assert (await http.post(CHAT, json=asked())).status_code == 500
    async with gateway_over(configured()) as (gateway, _):
        assert gateway.cascades is NO_CASCADES


def test_a_gateway_without_cascades_loads_no_numpy() -> None:
    code = (
        "import sys; from paceline.gateway import EngineConfig, Gateway, GatewayConfig\n"
        "from paceline.http.keys import KeyRing\n"
        "engine = EngineConfig(name='e', url='http://h')\n"
        "Gateway(GatewayConfig(engines=(engine,)), KeyRing(())); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


APIS: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text, "store": False, "instructions": "be brief"},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
}


@pytest.mark.parametrize("path", sorted(APIS))
async def test_other_apis_are_decided_by_the_prompt(tmp_path: Path, path: str) -> None:
    calibrated = calibration(tmp_path)
    async with cascade(said("small"), LARGE, calibration=calibrated) as (one, two, gateway, http):
        easy = await http.post(path, json={"model": "chat", **APIS[path]("hi")})
        assert easy.status_code == 200 and not two.bodies and one.paths == [path]
        assert 'routed; model="small"; why="score"' in easy.headers["x-paceline-cascade"]
        hard = await http.post(path, json={"model": "chat", **APIS[path]("why?")})
        assert hard.status_code == 200 and two.paths == [path] and len(one.bodies) == 1
        assert 'routed; model="chat"; why="score"' in hard.headers["x-paceline-cascade"]
        await until(lambda: is_clean(gateway))


def events(*told: dict[str, Any]) -> Step:
    """A stream of named events, of Anthropic's messages or OpenAI's responses."""
    parts = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in told]
    return Step(parts=tuple(parts))


MESSAGE = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
STREAMS: dict[str, Step] = {
    "/v1/completions": Step(
        parts=(
            b'data: {"id":"x","model":"m","choices":',
            b'[{"index":0,"text":"a","finish_reason":"stop"}]}',
            b"\n\ndata: [DONE]\n\n",
        )
    ),
    "/v1/responses": events(
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": {"id": "x", "output": []}},
    ),
    "/v1/messages": events(
        {"type": "content_block_delta", "delta": {"text": "a"}}, MESSAGE, {"type": "message_stop"}
    ),
}
# the engine ends behind the reason for it, and the gateway writes the last event
CUT = events({"type": "content_block_delta", "delta": {"text": "a"}}, MESSAGE)


@pytest.mark.parametrize(
    ("path", "stream"),
    [*STREAMS.items(), *((path, None) for path in STREAMS), ("/v1/messages", CUT)],
)
async def test_the_last_event_or_the_answer_says_who_wrote_it(
    tmp_path: Path, path: str, stream: Step | None
) -> None:
    small = said("small") if stream is None else stream
    async with cascade(small, small, calibration=calibration(tmp_path)) as (*_, gateway, http):
        for text, model in (("hi", "small"), ("why?", "chat")):
            body = {"model": "chat", "stream": stream is not None, **APIS[path](text)}
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if stream is None:
                last = answer.json()
            else:
                lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
                last = json.loads(lines[-1][6:])
                if path != "/v1/completions":
                    assert last["type"] in ("response.completed", "message_stop")
                assert not any('"paceline"' in line for line in lines[:-1])
            note = last["paceline"]["cascade"]
            assert (note["by"], note["model"], note["why"]) == ("routed", model, "score")
            assert 0 <= note["score"] <= 1 and 0 < note["threshold"] < 1
            assert f"score={note['score']}" in answer.headers["x-paceline-cascade"]
        # of a model without a cascade it is as its engine wrote it
        plain = await http.post(path, json=body | {"model": "small", "stream": stream is not None})
        assert "paceline" not in plain.text
        await until(lambda: is_clean(gateway))


async def test_a_response_that_is_stored_goes_where_later_ones_find_it(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(said("small"), LARGE, calibration=path) as (one, two, _, http):
        for more in ({}, {"store": True}, {"store": False, "previous_response_id": "x"}):
            response = await http.post(
                "/v1/responses", json={"model": "chat", "input": "hi", **more}
            )
            assert "x-paceline-cascade" not in response.headers
        several = await http.post("/v1/completions", json={"model": "chat", "prompt": ["a", "b"]})
        assert "x-paceline-cascade" not in several.headers
        assert not one.bodies and len(two.bodies) == 4
