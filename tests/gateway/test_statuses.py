"""Who is dead and who is busy: what statuses, silence and closed connections say of an engine, of a
model there, or of one request."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.gateway.upstreams.dialects.base import checked
from paceline.gateway.upstreams.standing import Standings
from paceline.statuses import LISTED, meaning_of, retry_of, told_as
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    VLLM,
    WHOLE,
    chat,
    configured,
    gateway_over,
    prefer_others,
    refused,
    serving,
    until,
)

ALL = range(400, 600)
LISTED_ALL = [status for statuses in LISTED.values() for status in statuses]
SOME = sorted({*LISTED_ALL, *range(400, 600, 11), 422, 451, 507, 520, 524, 530})
MANY = {"retry_share": 9.0, "retries_per_second": 99.0}
COMPLETIONS = "/v1/completions"


def tiers(**models: tuple[str, ...]) -> tuple[ModelConfig, ...]:
    """A tier for each place."""
    return tuple(
        ModelConfig(name=name, tiers=tuple((place,) for place in places))
        for name, places in models.items()
    )


def by_model(body: Any) -> tuple[int, Any]:
    """Answers model s522 with status 522, and the others with an answer."""
    if body["model"].startswith("s"):
        return int(body["model"][1:]), {"error": {"message": "no"}}
    return 200, {"choices": []}


def test_the_table_leaves_nothing_open() -> None:
    assert len(set(LISTED_ALL)) == len(LISTED_ALL)
    for status in ALL:
        assert (retry_of(status) == "nowhere") == (meaning_of(status) == "caller")
        assert retry_of(status, "true") == "anywhere" and retry_of(status, "false") == "nowhere"
        if meaning_of(status) in ("passing", "engine"):
            assert told_as(status) in (408, 409, 425, 429, 500, 502, 503, 504)
        if status >= 500:
            assert meaning_of(status) != "caller"
    assert {meaning_of(status) for status in (400, 413, 418, 422, 451)} == {"caller"}
    assert {meaning_of(status) for status in (500, 502, 504, 507, *range(520, 529))} == {"engine"}


async def test_each_status_is_told_or_asked_for_elsewhere_by_its_meaning() -> None:
    names = {f"s{status}": ("e1", f"e2:{status}") for status in SOME}
    alone = {f"alone{status}": (f"e1:s{status}",) for status in SOME}
    async with (
        scripted(WHOLE, models=(), pages={CHAT: by_model}) as bad,
        scripted(WHOLE, models=()) as good,
        gateway_over(
            configured(
                bad, good, models=tiers(**names, **alone), kinds={"e1": "openai", "e2": "openai"},
                **MANY,
                engine_fields={
                    "e1": {"models": tuple(names)}, "e2": {"models": tuple(map(str, SOME))},
                },
            )
        ) as (_, client),
    ):  # fmt: skip
        for status in SOME:
            answer = await client.post(CHAT, json=chat(model=f"s{status}"))
            only = await client.post(CHAT, json=chat(model=f"alone{status}"))
            assert only.status_code == told_as(status)
            if meaning_of(status) == "caller":
                assert answer.status_code == status and answer.json()["error"]["message"] == "no"
            else:
                assert answer.headers["x-paceline-engine"] == "e2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 402, 404, 424, 429, 500, 501, 503, 507, 522, 530])
async def test_who_keeps_refusing_is_left_alone(status: int, stream: bool) -> None:
    model = tiers(m=("e1:m", "e2:m"))
    async with (
        scripted(refused(status)) as bad,
        scripted(GOOD if stream else WHOLE) as good,
        gateway_over(configured(bad, good, models=model, **MANY)) as (gateway, client),
    ):
        for _ in range(9):
            assert (await client.post(CHAT, json=chat(stream=stream))).status_code == 200
        assert len(bad.bodies) == 5
        shown = (await client.get("/status")).json()["engines"]["e1"]
        assert shown["trouble"] in ("failing (open)", f"does not serve {CHAT}")
        # where no other engine is left, it is asked
        gateway.upstreams.by_name["e2"].draining = True
        assert (await client.post(CHAT, json=chat())).status_code == told_as(status)
        assert len(bad.bodies) == 6


async def test_an_endpoint_that_is_not_there_says_nothing_of_others() -> None:
    async with (
        scripted(WHOLE, pages={COMPLETIONS: (404, {})}) as old,
        scripted(WHOLE) as new,
        gateway_over(configured(old, new, models=tiers(m=("e1:m", "e2:m")), **MANY)) as (_, client),
    ):
        for _ in range(7):
            answer = await client.post(COMPLETIONS, json={"model": "m", "prompt": "x"})
            assert answer.headers["x-paceline-engine"] == "e2"
        assert old.asked.count(COMPLETIONS) == 5
        answer = await client.post(CHAT, json=chat())
        assert answer.headers["x-paceline-engine"] == "e1"


async def test_a_response_that_is_not_stored_says_nothing_of_the_model() -> None:
    body = {"model": "m", "input": "x"}
    async with (
        scripted(WHOLE, pages={"/v1/responses": (404, {})}) as engine,
        gateway_over(configured(engine, **MANY)) as (gateway, client),
    ):
        behind = {**body, "previous_response_id": "resp_1"}
        for asked, trouble in ((behind, ""), (body, "does not serve /v1/responses")):
            for _ in range(7):
                assert (await client.post("/v1/responses", json=asked)).status_code == 404
            standing = gateway.upstreams.by_name["e1"].standings["m"]
            assert standing.trouble("/v1/responses", gateway.now()) == trouble


@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"retry_after": "60"}), (529, {"retry_after": "60"}), (500, {}), (403, {})],
)
async def test_one_models_trouble_is_not_anothers(status: int, headers: dict[str, str]) -> None:
    def page(body: Any) -> Any:
        return by_model({"model": "fine" if body["model"] == "y" else f"s{status}"})

    steps = [replace(refused(status, **headers), delay=0.0)]
    async with (
        scripted(*steps, models=("x", "y")) as one,
        gateway_over(configured(one)) as (gateway, client),
    ):
        for _ in range(6):
            told = await client.post(CHAT, json=chat(model="x"))
        assert told.status_code == (429 if headers else told_as(status))
        one.script[:] = [WHOLE]
        assert (await client.post(CHAT, json=chat(model="y"))).status_code == 200
        shown = (await client.get("/status")).json()["engines"]["e1"]
        # of all its models only one has trouble
        assert (shown["state"], shown["breaker"], shown["cooldown_left_s"]) == (
            "ready",
            "closed",
            0.0,
        )
        assert shown["trouble"].startswith("x: ") and (await client.get("/health")).is_success
        metrics = (await client.get("/metrics")).text
        assert f'paceline:gateway_breaker_open{{engine="e1"}} {float(not headers)}' in metrics
        assert gateway.upstreams.by_name["e1"].num_opened == (0 if headers else 1)


@pytest.mark.parametrize("status", [404, 429, 500])
async def test_another_model_of_the_same_engine_may_serve_instead(status: int) -> None:
    model = tiers(m=("e1:large", "e1:small"))
    async with (
        scripted(refused(status), WHOLE, models=("large", "small")) as one,
        gateway_over(configured(one, models=model)) as (_, client),
    ):
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200 and answer.headers["x-paceline-fallback"] == "small"
        assert [body["model"] for body in one.bodies] == ["large", "small"]


def test_what_is_remembered_of_models_is_bounded() -> None:
    """Callers may invent their names; how often breakers opened is not forgotten."""
    standings = Standings()
    for number in range(2000):
        standing = standings.of(f"m{number}", 1.0)
        if number in (3, 4):
            for _ in range(5):
                standing.begin(CHAT, 1.0)
                standing.end(CHAT, "failed", 1.0)
    assert len(standings) <= 256 and "m3" in standings and standings.num_opened == 2
    for number in range(300):
        standings.of(f"paused{number}", 1.0).cool_down(99.0)
    assert len(standings) == 256 and "m3" not in standings and standings.num_opened == 2


# ---------------------------------------------------------------- late signs of life


def late(seconds: float) -> dict[str, Any]:
    """Of a vLLM: /metrics that come after so long."""

    async def metrics(_: Any) -> Any:
        await asyncio.sleep(seconds)
        return {}

    return {"/metrics": metrics}


KIND = {"e1": "vllm"}


@pytest.mark.parametrize("seconds", [0.2, 0.9, 60.0])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_whose_polls_are_late_is_asked(seconds: float, stream: bool) -> None:
    """Its answers take longer than ``liveness_timeout``, so it sends nothing while it works."""
    slow = replace(GOOD if stream else WHOLE, delay=0.5)
    fields = {"poll_timeout": 0.05, "liveness_timeout": 0.3}
    async with serving(slow, metrics=VLLM, kinds=KIND, **fields) as (one, gateway, client):
        state = gateway.upstreams.by_name["e1"]
        one.pages = late(seconds)
        before = state.num_polls
        await until(lambda: state.num_polls > before)
        state.silent += 2.0
        if seconds > 1.0:
            await until(lambda: state.num_misses > 1)
        assert (await client.get("/health/ready")).status_code == 200
        answers = [client.post(CHAT, json=chat(stream=stream)) for _ in range(3)]
        assert [a.status_code for a in await asyncio.gather(*answers)] == [200] * 3
        # it has answered a moment ago
        assert not state.usable(gateway.now()) and state.num_misses == 0


async def test_who_gives_no_sign_loses_its_requests_where_another_one_is_there() -> None:
    never = replace(WHOLE, delay=60.0)
    fields = {"poll_timeout": 0.05, "liveness_timeout": 0.3}
    async with (
        scripted(never, metrics=VLLM) as hangs,
        scripted(WHOLE, metrics=VLLM) as other,
        gateway_over(configured(hangs, other, **fields)) as (gateway, client),
    ):
        prefer_others(gateway, "e2")
        asked = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(hangs.bodies))
        hangs.frozen = True
        answer = await asked
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
        assert (await client.get("/status")).json()["engines"]["e1"]["state"] == "failing"
        await until(lambda: gateway.upstreams.by_name["e1"].num_misses > 0)
        # it gets no request of its own accord, and none that an engine has refused
        other.script[:] = [refused(500)]
        assert (await client.post(CHAT, json=chat())).status_code == 500
        assert len(hangs.bodies) == 1


async def test_who_is_alone_and_gives_no_sign_is_waited_for_as_long_as_a_stall_takes() -> None:
    never = replace(WHOLE, delay=60.0)
    fields = {"poll_timeout": 0.05, "liveness_timeout": 0.1, "stall_timeout": 0.5}
    async with serving(never, metrics=VLLM, **fields) as (hangs, _, client):
        asked = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(hangs.bodies))
        hangs.frozen = True
        done, _ = await asyncio.wait((asked,), timeout=0.3)
        assert not done
        answer = await asked
        assert answer.status_code == 503 and "has not answered for" in answer.text


async def test_who_takes_no_connection_is_gone_at_once() -> None:
    async with scripted(WHOLE, metrics=VLLM) as one:
        config = configured(one, poll_timeout=0.05)
    async with gateway_over(config) as (gateway, client):
        state = gateway.upstreams.by_name["e1"]
        await until(lambda: state.num_misses > 0)
        assert state.silent < 1.0 and state.is_unreachable
        assert (await client.get("/health/ready")).status_code == 503
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code in (404, 503)


@pytest.mark.parametrize("why", ["at_capacity", "cooling_down"])
async def test_a_gateway_whose_engines_are_busy_is_ready(why: str) -> None:
    busy = replace(WHOLE, delay=0.3) if why == "at_capacity" else refused(429, retry_after="60")
    bound = {"engine_fields": {"e1": {"max_concurrent": 1}}}
    async with serving(busy, **bound) as (one, gateway, client):
        first = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: bool(one.bodies))
        if why == "cooling_down":
            await first
        shown = (await client.get("/status")).json()["engines"]["e1"]
        assert shown["state"] == why
        for path in ("/health", "/health/ready", "/ping"):
            assert (await client.get(path)).status_code == 200
        await first
        gateway.upstreams.by_name["e1"].draining = True
        assert (await client.get("/health")).status_code == 503


async def test_a_gateway_whose_engines_all_fail_is_not_ready() -> None:
    async with serving(refused(500)) as (_, _, client):
        for _ in range(5):
            await client.post(CHAT, json=chat())
        assert (await client.get("/health")).status_code == 503


# ---------------------------------------------------------------- connections and answers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_closes_as_it_is_used_again_is_no_failure(stream: bool) -> None:
    """An engine that closes each one behind an answer, without saying so, and at once."""
    step = GOOD if stream else WHOLE
    gone = Step(raw=b"")
    async with serving([*[step, gone] * 4, step], kinds={"e1": "openai"}) as (_, gateway, client):
        for _ in range(4):
            answer = await client.post(CHAT, json=chat(stream=stream))
            assert answer.status_code == 200 and answer.headers["x-paceline-attempts"] == "1"
        metrics = (await client.get("/metrics")).text
        assert "attempt_failures_total{" not in metrics
        assert gateway.upstreams.by_name["e1"].failed_at < 0.0


async def test_a_request_of_which_a_byte_came_is_not_sent_twice() -> None:
    half = Step(raw=b"HTTP/1.1 200 OK\r\ncontent-len")
    async with serving((WHOLE, half)) as (one, _, client):
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert (await client.post(CHAT, json=chat())).status_code == 503
        assert len(one.bodies) == 2


EMPTY = {
    CHAT: "choices",
    COMPLETIONS: "choices",
    "/v1/responses": "output",
    "/v1/messages": "content",
    "/v1/embeddings": "data",
    "/v1/rerank": "results",
    "/v1/score": "data",
}


@pytest.mark.parametrize("path", EMPTY)
def test_an_answer_without_its_list_is_refused(path: str) -> None:
    name = EMPTY[path].encode()
    for body in (b'{"%b": null}' % name, b"{}", b'{"%b": {}}' % name, b'{"%b": ""}' % name):
        with pytest.raises(ValueError, match="it has no"):
            checked(path, body)
    with pytest.raises(ValueError, match="it reports an error"):
        checked(path, b'{"error": {"message": "no"}, "%b": null}' % name)
    # nothing was found, or said; some name an error that there is not
    for body in (b'{"%b": []}' % name, b'{"error": null, "%b" : [ 1]}' % name):
        assert checked(path, body) == body
    if name in (b"data", b"results"):
        # vLLM's vectors as bytes, ranks of SGLang
        for body in (b"{\x00\xff", b"\x00" * 8, b"[]"):
            assert checked(path, body) == body


@pytest.mark.parametrize("body", [b'{"choices": null}', b'{"choices":null,"usage":{}}'])
async def test_an_answer_with_the_word_alone_is_asked_for_elsewhere(body: bytes) -> None:
    async with (
        scripted(Step(parts=(body,), stream=False)) as bad,
        scripted(WHOLE) as good,
        gateway_over(configured(bad, good, models=tiers(m=("e1:m", "e2:m")))) as (_, client),
    ):
        for stream in (False, True):
            answer = await client.post(CHAT, json=chat(stream=stream))
            assert answer.headers["x-paceline-engine"] == "e2"


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate" / "gateway.md").read_text()
    table = page.partition("### What a status means")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| the ")]
    names = {"gateway's account": "account", "moment": "passing"}
    shown = {
        names.get(name[6:], name[6:]): tuple(
            map(int, re.findall(r"\d{3}", text.split(", 500 ")[0]))
        )
        for name, text in rows
    }
    assert shown.pop("caller") == (400, 499) and shown == LISTED
