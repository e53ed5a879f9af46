"""Answers under pressure: 429 with a time to come back, expiry, explanations, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.slo import Slo
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect, events, metric, scrape

SLOW = chat_body("slow", max_tokens=100, ignore_eos=True)


@pytest.fixture
async def busy() -> AsyncIterator[httpx.AsyncClient]:
    """One request runs at a time, two may wait; a step takes 5 ms."""
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.005)
    client = null_client(backend, max_num_seqs=1, max_num_waiting=2)
    config = ServerConfig(
        slo_classes={"fast": Slo(slo_class="fast", ttft=0.001)}, price_per_hour=3.6
    )
    async with connect(create_app(client, config)) as http:
        yield http
    await client.close()


def ask(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(http.post("/v1/chat/completions", json=body, headers=headers))


async def running(http: httpx.AsyncClient) -> asyncio.Task[Any]:
    """One more request that runs, for half a second."""
    before = metric(await scrape(http), "vllm:num_requests_running", engine="0")
    task = ask(http, SLOW)
    for _ in range(400):
        if metric(await scrape(http), "vllm:num_requests_running", engine="0") > before:
            return task
        await asyncio.sleep(0.005)
    raise AssertionError("it never ran")


async def test_a_full_queue_is_429_with_a_time_to_come_back(busy: httpx.AsyncClient) -> None:
    first = await running(busy)
    waiting = [ask(busy, SLOW), ask(busy, SLOW)]
    await asyncio.sleep(0.05)
    for stream in (False, True):
        refused = await busy.post("/v1/chat/completions", json=SLOW | {"stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-llm-d-request-dropped-reason"] == "queue-full"
        error = refused.json()["error"]
        assert "2 requests wait already, the limit is 2" in error["message"]
        assert error["code"] == 429
    answers = await asyncio.gather(first, *waiting)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    text = await scrape(busy)
    assert metric(text, "paceline:requests_refused_total", reason="queue-full") == 2
    assert metric(text, "paceline:slo_violations_total", kind="refused") == 2
    assert metric(text, "paceline:slo_requests_total", slo_class="standard") == 5
    assert metric(text, "paceline:goodput_requests_total", slo_class="standard") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_not_started_in_time_is_dropped(
    busy: httpx.AsyncClient, stream: bool
) -> None:
    first = await running(busy)
    late = ask(busy, SLOW | {"n": 1, "stream": stream}, **{"x-llm-d-inference-ttl": "50ms"})
    dropped = await late
    assert dropped.status_code == 429
    assert dropped.headers["x-llm-d-request-dropped-reason"] == "expired"
    assert "without being started" in dropped.json()["error"]["message"]
    assert not first.done(), "it did not have to wait for that"
    assert (await first).status_code == 200


@pytest.fixture
async def pair() -> AsyncIterator[httpx.AsyncClient]:
    """Two requests run at a time, as many choices as one may have, and two may wait."""
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.005)
    client = null_client(backend, max_num_seqs=2, max_num_waiting=2)
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def test_all_choices_of_an_expired_request_are_dropped(pair: httpx.AsyncClient) -> None:
    first = [await running(pair), await running(pair)]
    body = SLOW | {"n": 2, "slo": {"queue_ttl_ms": 30}}
    assert (await ask(pair, body)).status_code == 429
    assert not any(task.done() for task in first), "they did not have to wait for that"
    answers = await asyncio.gather(*first)
    assert [answer.status_code for answer in answers] == [200, 200]
    text = await scrape(pair)
    assert metric(text, "vllm:num_requests_waiting", engine="0") == 0
    assert metric(text, "vllm:generation_tokens_total", engine="0") == 200


async def test_choices_find_places_together_or_not_at_all(pair: httpx.AsyncClient) -> None:
    tasks = [await running(pair), await running(pair), ask(pair, SLOW | {"max_tokens": 3})]
    while metric(await scrape(pair), "vllm:num_requests_waiting", engine="0") < 1:
        await asyncio.sleep(0.005)
    refused = await ask(pair, SLOW | {"n": 2})
    assert refused.status_code == 429
    assert refused.headers["x-llm-d-request-dropped-reason"] == "queue-full"
    assert "this one has n=2 choices" in refused.json()["error"]["message"]
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200, 200, 200]


@pytest.mark.parametrize(("num_seqs", "num_waiting", "most"), [(2, 3, 2), (3, 2, 2), (4, None, 4)])
async def test_more_choices_than_can_run_or_wait_are_a_mistake(
    num_seqs: int, num_waiting: int | None, most: int
) -> None:
    client = null_client(
        NullBackend(vocab_size=VOCAB), max_num_seqs=num_seqs, max_num_waiting=num_waiting
    )
    async with connect(create_app(client, ServerConfig())) as http:
        body = SLOW | {"max_tokens": 1}
        good = await ask(http, body | {"n": most})
        assert good.status_code == 200, good.text
        answer = await ask(http, body | {"n": most + 1})
    await client.close()
    assert answer.status_code == 400
    assert f"{most}" in answer.json()["error"]["message"]


async def test_an_explanation_says_why_it_waited(busy: httpx.AsyncClient) -> None:
    first = await running(busy)
    answer = (await ask(busy, SLOW | {"explain": True, "max_tokens": 3})).json()
    await first
    (timeline,) = answer["usage"]["timeline"]
    assert timeline["waited_ms"]["slots"] > 10.0
    assert timeline["queued_ms"] == pytest.approx(sum(timeline["waited_ms"].values()), abs=0.1)
    assert timeline["ttft_ms"] > timeline["queued_ms"]
    assert timeline["preemptions"] == timeline["recomputed_tokens"] == 0
    assert not timeline["demoted"]
    assert (
        metric(await scrape(busy), "paceline:request_waited_seconds_total", reason="slots") > 0.01
    )
    plain = (await ask(busy, SLOW | {"max_tokens": 3})).json()
    assert "timeline" not in plain["usage"]


async def test_a_streamed_explanation_comes_with_the_usage(busy: httpx.AsyncClient) -> None:
    answer = await ask(busy, SLOW | {"explain": True, "stream": True, "max_tokens": 3})
    usage = [event["usage"] for event in events(answer.text) if event.get("usage")]
    assert len(usage) == 1
    assert usage[0]["timeline"][0]["chunks"] == 1


async def test_configured_classes_are_known_and_built_in_ones_stay(
    busy: httpx.AsyncClient,
) -> None:
    assert (await ask(busy, SLOW | {"slo": "fast", "max_tokens": 2})).status_code == 200
    assert (await ask(busy, SLOW | {"slo": "batch", "max_tokens": 2})).status_code == 200
    unknown = await ask(busy, SLOW | {"slo": "slow"})
    assert unknown.status_code == 400
    assert "interactive, standard, batch, fast" in unknown.json()["error"]["message"]
    text = await scrape(busy)
    assert metric(text, "paceline:slo_violations_total", slo_class="fast", kind="ttft") == 1


async def test_steps_and_their_price_are_metrics(busy: httpx.AsyncClient) -> None:
    await ask(busy, SLOW)
    text = await scrape(busy)
    actual = metric(text, "paceline:step_seconds_total", kind="actual")
    predicted = metric(text, "paceline:step_seconds_total", kind="predicted")
    assert actual > 0.2
    assert predicted == pytest.approx(actual, rel=0.5)
    assert metric(text, "paceline:cost_per_million_tokens", engine="0") > 0.0
    assert metric(text, "paceline:memory_pressure_level", engine="0") == 0
