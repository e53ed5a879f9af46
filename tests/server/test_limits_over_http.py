"""Limits as callers see them: status, headers, what is charged and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.engine.testing import null_client
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.limiter import caller_of
from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.server import ServerConfig, create_app
from paceline.server.app import batches_of
from paceline.server.settings.config import BatchConfig
from tests.server.helpers import (
    VOCAB,
    chat_body,
    chat_prompt,
    connect,
    events,
    expected_text,
    metric,
    say,
    scrape,
)

# windows of a day: no test runs across the end of one
DAY = 86400
ALICE, BOB, ROOT = "alice-key-0123", "bob-key-01234", "root-key-01234"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def limited(
    limits: KeyLimits,
    *,
    own: Mapping[str, Any] | None = None,
    keys: bool = True,
    batches: BatchConfig | None = None,
    **backend: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """An app with keys alice, bob (whose limits are ``own``) and root."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, **backend))
    ring = (
        ApiKey.of("alice", "user", ALICE),
        ApiKey("bob", "user", ApiKey.of("bob", "user", BOB).digest, dict(own or {})),
        ApiKey.of("root", "admin", ROOT),
    )
    config = ServerConfig(api_keys=ring if keys else (), limits=limits, batches=batches)
    app = create_app(client, config)
    async with connect(app) as http:
        yield http
    await batches_of(app).stop()
    await app.state.service.limiter.close()
    await client.close()


def told(answer: httpx.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {k[len(prefix) :]: v for k, v in answer.headers.items() if k.startswith(prefix)}


def text_body(max_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    """A prompt of 10 tokens; exactly ``max_tokens`` come."""
    prompt = [65 + i for i in range(10)]
    return {"prompt": prompt, "max_tokens": max_tokens, "logit_bias": say("x"), **fields}


async def test_requests() -> None:
    async with limited(KeyLimits(requests=Rate(3, DAY)), own={"requests": None}) as http:
        for left in (2, 1, 0):
            answer = await http.post(TEXT, json=text_body(), headers=bearer(ALICE))
            assert answer.status_code == 200
            headers = told(answer)
            assert headers["limit-requests"] == "3"
            assert headers["remaining-requests"] == str(left)
            assert headers["reset-requests"].endswith("s")
            assert "limit-tokens" not in headers
        refused = await http.post(TEXT, json=text_body(), headers=bearer(ALICE))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 2 * DAY
        assert told(refused)["remaining-requests"] == "0"
        assert "the limit is 3/day" in refused.json()["error"]["message"]
        assert refused.headers["x-request-id"]
        # every API and every error counts and is counted against; reading does not
        for path in ("/v1/messages", "/v1/responses", "/tokenize", "/nowhere"):
            answer = await http.post(path, content=b"not json", headers=bearer(ALICE))
            assert answer.status_code == 429, path
        anthropic = await http.post("/v1/messages", json={}, headers=bearer(ALICE))
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await http.post("/ping")).status_code == 200
        # bob has no limit, and so nothing is told
        for _ in range(5):
            answer = await http.post(TEXT, json=text_body(), headers=bearer(BOB))
            assert answer.status_code == 200 and not told(answer)
        metrics = (await http.get("/metrics", headers=bearer(ROOT))).text
        assert metric(metrics, "paceline:rate_limited_total", limit="requests") == 6
        assert "storage" not in metrics


async def test_errors_count_and_say_what_is_left() -> None:
    async with limited(KeyLimits(requests=Rate(2, DAY), tokens=Rate(100, DAY))) as http:
        bad = await http.post(TEXT, json={"prompt": 5}, headers=bearer(ALICE))
        assert bad.status_code == 400
        assert told(bad)["remaining-requests"] == "1"
        assert told(bad)["remaining-tokens"] == "100"
        assert told(bad)["reset-tokens"] == "0ms"
        wrong = await http.post(TEXT, json={}, headers=bearer("wrong-key-0123"))
        assert wrong.status_code == 401 and not told(wrong)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_given_back(stream: bool) -> None:
    async with limited(KeyLimits(tokens=Rate(200, DAY))) as http:
        # 10 + 100 are reserved, 10 + 5 are used: it stops at the fifth
        body = text_body(100, stop=["xxxxx"], stream=stream)
        answer = await http.post(TEXT, json=body, headers=bearer(ALICE))
        assert answer.status_code == 200
        # the headers of a stream are sent while the reservation stands
        assert told(answer)["remaining-tokens"] == ("90" if stream else "185")
        again = await http.post(TEXT, json=text_body(175), headers=bearer(ALICE))
        assert again.status_code == 200
        assert told(again)["remaining-tokens"] == "0"


async def test_all_choices_and_prompts_are_reserved() -> None:
    async with limited(KeyLimits(tokens=Rate(100, DAY))) as http:
        body = text_body(20, prompt=[[65] * 10, [66] * 10], n=2)
        answer = await http.post(TEXT, json=body, headers=bearer(ALICE))
        assert answer.status_code == 200
        # two prompts once each, and two choices of twenty of both
        assert told(answer)["remaining-tokens"] == "0"
        assert answer.json()["usage"]["total_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_tokens_now_and_at_any_time(stream: bool) -> None:
    async with limited(KeyLimits(tokens=Rate(100, DAY))) as http:
        await http.post(TEXT, json=text_body(50), headers=bearer(ALICE))
        later = await http.post(TEXT, json=text_body(60, stream=stream), headers=bearer(ALICE))
        assert later.status_code == 429
        assert int(later.headers["retry-after"]) > 0
        assert "40 are left, this request takes 70" in later.json()["error"]["message"]
        # waiting would not help this one
        never = await http.post(TEXT, json=text_body(91, stream=stream), headers=bearer(ALICE))
        assert never.status_code == 400 and "retry-after" not in never.headers
        assert never.json()["error"]["param"] == "max_tokens"
        assert "101 tokens" in never.json()["error"]["message"]
        # neither was charged
        fits = await http.post(TEXT, json=text_body(30), headers=bearer(ALICE))
        assert fits.status_code == 200 and told(fits)["remaining-tokens"] == "0"


async def test_every_api_is_charged() -> None:
    async with limited(KeyLimits(tokens=Rate(10_000, DAY))) as http:
        left = 10_000
        for path, body in (
            (CHAT, chat_body(max_tokens=3)),
            (TEXT, text_body(3)),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
            ("/v1/messages", chat_body(max_tokens=3)),
            ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 3}}),
        ):
            answer = await http.post(path, json=body, headers=bearer(ALICE))
            assert answer.status_code == 200, answer.text
            now = int(told(answer)["remaining-tokens"])
            assert 3 <= left - now <= 60, path
            left = now


async def test_background_responses_are_charged_too() -> None:
    async with limited(KeyLimits(tokens=Rate(1000, DAY))) as http:
        body = {"input": "hi", "max_output_tokens": 3, "background": True}
        made = (await http.post("/v1/responses", json=body, headers=bearer(ALICE))).json()
        for _ in range(200):
            path = f"/v1/responses/{made['id']}"
            found = (await http.get(path, headers=bearer(ALICE))).json()
            if found["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.01)
        assert found["usage"]["output_tokens"] == 3
        after = await http.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))
        assert int(told(after)["remaining-tokens"]) == 1000 - found["usage"]["total_tokens"]


async def test_batches_are_nobodys_exchange(tmp_path: Path) -> None:
    """The request that first needs the runner of batches starts it, and is not charged for it."""
    limits = KeyLimits(tokens=Rate(500, DAY), concurrent=1)
    async with limited(limits, batches=BatchConfig(folder=tmp_path / "batches")) as http:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": TEXT, "body": text_body(20)}
            for i in range(8)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        uploaded = await http.post(
            "/v1/files",
            files={"file": ("lines.jsonl", content)},
            data={"purpose": "batch"},
            headers=bearer(ALICE),
        )
        assert uploaded.status_code == 200, uploaded.text
        body = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": TEXT,
            "completion_window": "24h",
        }
        made = (await http.post("/v1/batches", json=body, headers=bearer(ALICE))).json()
        for _ in range(500):
            path = f"/v1/batches/{made['id']}"
            found = (await http.get(path, headers=bearer(ALICE))).json()
            if found["status"] in ("completed", "failed"):
                break
            await asyncio.sleep(0.01)
        assert found["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        after = await http.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))
        assert told(after)["remaining-tokens"] == "500"


async def generated(http: httpx.AsyncClient, count: int) -> None:
    """Until the engine has made so many tokens."""
    async with asyncio.timeout(10.0):
        while True:
            metrics = (await http.get("/metrics", headers=bearer(ROOT))).text
            if metric(metrics, "vllm:generation_tokens_total") >= count:
                return
            await asyncio.sleep(0.01)


async def left(http: httpx.AsyncClient) -> int:
    after = await http.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))
    return int(told(after)["remaining-tokens"])


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": [[65] * 5, [66] * 5]}])
async def test_what_the_caller_leaves_is_given_back(fields: dict[str, Any]) -> None:
    """Less what was made until then, also where nothing of it was sent yet."""
    async with limited(KeyLimits(tokens=Rate(1000, DAY)), step_time=0.01) as http:
        body = text_body(400, **fields)
        task = asyncio.ensure_future(http.post(TEXT, json=body, headers=bearer(ALICE)))
        await generated(http, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert 500 <= await left(http) <= 970


async def test_a_background_response_that_is_cancelled_is_charged_for_what_it_made() -> None:
    async with limited(KeyLimits(tokens=Rate(1000, DAY)), step_time=0.01) as http:
        # one that does not end by itself
        texts = (f"hi {i}" for i in range(100))
        text = next(t for t in texts if len(expected_text(chat_prompt(t), 400)[0]) == 400)
        body = {"input": text, "max_output_tokens": 400, "background": True}
        made = await http.post("/v1/responses", json=body, headers=bearer(ALICE))
        await generated(http, 20)
        path = f"/v1/responses/{made.json()['id']}/cancel"
        ended = await http.post(path, headers=bearer(ALICE))
        assert ended.json()["status"] == "cancelled"
        async with asyncio.timeout(5.0):
            # 400 and the prompt are reserved until it is over
            while await left(http) <= 600:
                await asyncio.sleep(0.01)
        assert await left(http) < 980


async def test_a_whole_answer_that_fails_is_charged_for_what_it_made() -> None:
    prompt = text_body()["prompt"]
    said = expected_tokens(prompt, 60, VOCAB)
    # it ends once this one is to be read
    poison = next(said[i] for i in range(20, 60) if said[i] not in (*prompt, *said[:i]))
    async with limited(KeyLimits(tokens=Rate(1000, DAY)), poison_token=poison) as http:
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        answer = await http.post(TEXT, json=body, headers=bearer(ALICE))
        assert answer.status_code == 500
        assert await left(http) == 1000 - len(prompt) - said.index(poison) - 1


async def test_a_refusal_by_the_engine_costs_nothing() -> None:
    async with limited(KeyLimits(tokens=Rate(1000, DAY))) as http:
        body = text_body(100, structured_outputs={"regex": "(?=a)"})
        answer = await http.post(TEXT, json=body, headers=bearer(ALICE))
        assert answer.status_code == 400
        assert told(answer)["remaining-tokens"] == "1000"


async def test_a_request_that_fails_before_its_first_token_costs_nothing() -> None:
    body = text_body(100)
    poison = body["prompt"][0]
    async with limited(KeyLimits(tokens=Rate(1000, DAY)), poison_token=poison) as http:
        answer = await http.post(TEXT, json=body, headers=bearer(ALICE))
        assert answer.status_code == 500
        assert told(answer)["remaining-tokens"] == "1000" and await left(http) == 1000


async def test_what_is_held_by_others_is_waited_for_shortly() -> None:
    async with limited(KeyLimits(tokens=Rate(600, DAY)), step_time=0.02) as http:
        first = asyncio.ensure_future(http.post(TEXT, json=text_body(400), headers=bearer(ALICE)))
        await generated(http, 2)
        second = await http.post(TEXT, json=text_body(300), headers=bearer(ALICE))
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_requests_at_once() -> None:
    async with limited(KeyLimits(concurrent=2), own={"concurrent": 1}, step_time=0.02) as http:
        tasks = [
            asyncio.ensure_future(http.post(TEXT, json=text_body(20), headers=bearer(ALICE)))
            for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        third = await http.post(TEXT, json=text_body(), headers=bearer(ALICE))
        assert third.status_code == 429 and third.headers["retry-after"] == "1"
        assert "2 requests" in third.json()["error"]["message"]
        # another key, and what is not generation, are not held up
        for path, body, key in ((TEXT, text_body(), BOB), ("/tokenize", {"prompt": "x"}, ALICE)):
            assert (await http.post(path, json=body, headers=bearer(key))).status_code == 200
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
        last = await http.post(TEXT, json=text_body(), headers=bearer(ALICE))
        assert last.status_code == 200
        metrics = (await http.get("/metrics", headers=bearer(ROOT))).text
        assert metric(metrics, "paceline:rate_limited_total", limit="concurrent") == 1


async def test_a_stream_refused_midway_is_whole() -> None:
    """A 429 comes before a stream begins, never inside of it."""
    async with limited(KeyLimits(tokens=Rate(60, DAY))) as http:
        first = await http.post(TEXT, json=text_body(40, stream=True), headers=bearer(ALICE))
        assert len(events(first.text)) >= 1
        second = await http.post(TEXT, json=text_body(40, stream=True), headers=bearer(ALICE))
        assert second.status_code == 429
        assert second.headers["content-type"] == "application/json"


async def test_without_keys_an_address_is_a_caller() -> None:
    async with limited(KeyLimits(requests=Rate(2, DAY)), keys=False) as http:
        statuses = [(await http.post(TEXT, json=text_body())).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert metric(await scrape(http), "paceline:rate_limited_total", limit="requests") == 1


def test_who_is_counted() -> None:
    assert caller_of("alice", ("10.0.0.1", 5)) == "alice"
    assert caller_of("", ("10.0.0.1", 5)) == "address 10.0.0.1"
    one, other = ("2001:db8:1:2::1", 5), ("2001:db8:1:2:ffff::9", 6)
    assert caller_of("", one) == caller_of("", other) == "address 2001:db8:1:2::"
    assert caller_of("", None) == "address " and caller_of("", ("/run/x", 0)) == "address /run/x"


async def test_without_limits_nothing_is_told() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    app = create_app(client, ServerConfig())
    assert app.state.service.limiter is None
    async with connect(app) as http:
        answer = await http.post(TEXT, json=text_body())
        assert answer.status_code == 200 and not told(answer)
        assert "rate_limit" not in await scrape(http)
    await client.close()
