"""What is reserved for requests and charged for them: never more than a limit or a budget, and at
the end what was used, to the token."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from redis.asyncio import Redis

from paceline.gateway import Gateway, app
from paceline.gateway.billing import leases
from paceline.gateway.billing.budgets import Budgets, Cost, LocalStore
from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.settings.config import KeyConfig, PriceConfig
from paceline.gateway.settings.prices import Budget, Used, show_amount
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import Want
from paceline.http.rate_limits.store import RateStore
from tests.gateway.counting_engine import CountingEngine, counting, prompt_tokens
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import ANY, CHAT, chat, configured, gateway_over, refused, serving, until
from tests.gateway.proxy.test_hedging import _known
from tests.http.rate_limits.redis_server import RedisServer

MILLIONTH: Final = 10**6
LIMIT: Final = 6000
# of a million tokens
PRICE: Final = PriceConfig(input=10, output=100)
BUDGET: Final = "0.50/total"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
MEMORY, REDIS = "memory", "redis"


@pytest.fixture(params=[MEMORY, pytest.param(REDIS, marks=pytest.mark.services)])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Nothing, or a Redis that is waited for: what does not answer is not counted in."""
    if request.param == MEMORY:
        yield ""
        return
    monkeypatch.setattr(app, "RateStore", partial(RateStore, timeout=20.0))
    monkeypatch.setattr(leases, "_TIMEOUT", 20.0)
    server = RedisServer(tmp_path)
    yield server.url
    server.stop()


@asynccontextmanager
async def limited(
    storage: str, num_keys: int, context: int | None, **fields: Any
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient, list[CountingEngine]]]:
    """Two engines of Paceline's kind behind keys with a limit of tokens and a budget each."""
    keys = tuple(ApiKey.of(f"key{i}", "user", f"secret-{i}") for i in range(num_keys))
    fields = {
        "prices": (PRICE,), "spend_storage": "", "rate_limit_storage": storage,
        "rate_limit_tokens": f"{LIMIT}/300day", "keys": (KeyConfig(name="*", budget=BUDGET),),
        "retries_per_second": 1000.0, "liveness_timeout": 30.0, "sse_keep_alive": 0.0, **fields,
    }  # fmt: skip
    sent: Counter[str] = Counter()
    async with counting(sent, context) as one, counting(sent, context) as two:
        config = configured(one, two, **fields)  # type: ignore[arg-type]
        async with gateway_over(config, keys) as (gateway, client):
            yield gateway, client, [one, two]


def asked(draw: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A request: its path and body."""
    told: dict[str, Any] = {"id": number, "make": draw.choice((0, 1, 20, 20, 200, 1500))}
    told["pad"] = "x" * draw.choice((0, 0, 40, 300))
    path = draw.choice((CHAT, CHAT, CHAT, "/v1/completions", EMBEDDINGS, MESSAGES, RESPONSES))
    fields: dict[str, Any] = {"model": "m"}
    limit = draw.choice((None, None, 1, 30, 400, 2000))
    if limit is not None:
        fields["max_output_tokens" if path == RESPONSES else "max_tokens"] = limit
    how = draw.random()
    if how < 0.05:
        fields["model"] = "of another"
    elif how < 0.15:
        # none that asks for a pause, which others would wait for
        told["refuse"] = draw.choice((400, 404, 422, 500, 502))
    elif how < 0.25 or (how < 0.4 and path != CHAT):
        told |= {"cuts": draw.choice((1, 1, 2)), "cut": draw.randrange(1, 5)}
    elif how < 0.6 and path == CHAT:
        fields["stream"] = True
        told["make"] = draw.choice((1, 5, 20, 100))
        if draw.random() < 0.5:
            told |= {"cuts": draw.choice((1, 1, 2, 3)), "cut": draw.randrange(1, 5)}
        elif draw.random() < 0.5:
            told["stall"] = draw.randrange(1, 5)
        elif draw.random() < 0.2:
            told["late"] = 0.15
    elif how < 0.7 and path in (CHAT, "/v1/completions"):
        fields["n"] = draw.choice((2, 3))
        if path == "/v1/completions":
            fields["best_of"] = 4
    text = json.dumps(told)
    if path in (EMBEDDINGS, RESPONSES):
        return path, {**fields, "input": text}
    if path == "/v1/completions":
        return path, {**fields, "prompt": text}
    return path, {**fields, "messages": [{"role": "user", "content": text}]}


async def used(
    client: httpx.AsyncClient, key: int, path: str, body: dict[str, Any]
) -> tuple[int, int]:
    """Tokens of prompt and output that its caller has had of an answer."""
    text = body.get("input") or body.get("prompt") or body["messages"][0]["content"]
    told = json.loads(text)
    headers = {"authorization": f"Bearer secret-{key}"}
    if not body.get("stream"):
        answer = await client.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            return 0, 0
        usage = answer.json()["usage"]
        prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
        return prompt, usage.get("completion_tokens") or usage.get("output_tokens") or 0
    made = 0
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            return 0, 0
        async for line in answer.aiter_lines():
            made += '"content"' in line and '"a"' in line
            if made and made == told.get("stall"):
                break
    return (prompt_tokens(text), made) if made or told["make"] == 0 else (0, 0)


async def many(storage: str, count: int, context: int | None, seed: int) -> None:
    """Random requests of several keys, six of a key at once, until most of the keys have used all
    that they may."""
    draw = random.Random(seed)
    num_keys = max(2, count // 60)
    async with limited(storage, num_keys, context, hedge_share=0.5, hedge_after=0.05) as (
        gateway, client, _
    ):  # fmt: skip
        _known(gateway)
        limiter = gateway._limiter
        assert limiter is not None
        found = [[0, 0] for _ in range(num_keys)]
        requests = [asked(draw, number) for number in range(count)]

        async def caller(key: int, place: int) -> None:
            for path, body in requests[key::num_keys][place::6]:
                prompt, output = await used(client, key, path, body)
                found[key][0] += prompt
                found[key][1] += output
                window = (await limiter.usage(f"key{key}")).windows["tokens"]
                # charged and reserved
                assert window.used <= LIMIT

        for group in range(0, num_keys, 4):
            keys = range(group, min(group + 4, num_keys))
            await asyncio.gather(*(caller(key, place) for key in keys for place in range(6)))
        await until(lambda: not gateway.in_flight and limiter.is_settled)
        for key, (prompt, output) in enumerate(found):
            window = (await limiter.usage(f"key{key}")).windows["tokens"]
            assert window.used == prompt + output <= LIMIT
            cost = (10 * prompt + 100 * output) * MILLIONTH
            status = gateway.spending.status().get(f"key{key}", {"spent": "0.00"})
            assert status["spent"] == show_amount(cost) and cost <= 5 * 10**11
        # the limits were felt
        assert sum(map(sum, found)) > num_keys * LIMIT // 12
    if storage:
        async with Redis.from_url(storage) as redis:
            for key, (prompt, output) in enumerate(found):
                told = await redis.get(f"paceline:budget:{{key{key}}}:")
                assert int(told or 0) == (10 * prompt + 100 * output) * MILLIONTH


async def test_no_request_takes_a_key_beyond_its_limit(storage: str) -> None:
    await many(storage, 120, None, 1)


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_ten_thousand_requests_take_no_key_beyond_its_limit(storage: str) -> None:
    await many(storage, 10_000, 3000 if storage else None, 2)


# ------------------------------------------------------------------------------ one by one


def whole(prompt: int, output: int, **fields: Any) -> Step:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    of_any_api = json.loads(ANY.parts[0])
    return Step(
        parts=(json.dumps({**of_any_api, "usage": usage}).encode(),), stream=False, **fields
    )


def left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_an_engine_that_heeds_no_limit_takes_no_key_beyond_its_own() -> None:
    """Answers without a stated length."""
    long = whole(5, 5000)
    async with serving(long, rate_limit_tokens="10000/300day") as (engine, _, client):
        first, second = [await client.post(CHAT, json=chat()) for _ in range(2)]
        assert (first.status_code, left(first)) == (200, 4995)
        # another one as long would not fit
        assert (second.status_code, len(engine.bodies)) == (429, 1)
        # one that says that it is short does
        engine.script[:] = [whole(5, 50)]
        short = await client.post(CHAT, json=chat(max_tokens=50))
        assert (short.status_code, left(short)) == (200, 4940)


async def test_a_budget_is_not_overrun_by_many_at_once_that_say_no_length() -> None:
    # each costs 0.20
    keys = (KeyConfig(name="*", budget="0.30/day"),)
    fields = {"prices": (PriceConfig(input=1, output=10),), "keys": keys, "spend_storage": ""}
    async with serving(whole(5, 20_000, delay=0.2), **fields) as (_, gateway, client):
        sent = [client.post(CHAT, json=chat()) for _ in range(20)]
        found = await asyncio.gather(*sent)
        assert Counter(each.status_code for each in found) == {200: 1, 429: 19}
        # it is a matter of seconds
        assert {each.headers.get("retry-after") for each in found} == {None, "1"}
        assert gateway.spending.status()["anybody"]["spent"] == "0.200005"
        last = await client.post(CHAT, json=chat())
        assert last.status_code == 429 and int(last.headers["retry-after"]) > 1


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "max_tokens"), ("/v1/completions", "max_tokens"), (RESPONSES, "max_output_tokens"),
     (MESSAGES, "max_tokens")],
)  # fmt: skip
async def test_an_engine_is_asked_for_no_more_than_was_reserved(path: str, name: str) -> None:
    body = chat(input="hi", prompt="hi", max_completion_tokens=None)
    limits = {"rate_limit_tokens": "50000/300day"}
    async with serving(whole(5, 10), **limits, default_max_tokens=300) as (engine, _, client):
        for fields in ({}, {name: -1}, {name: None}, {name: 20_000}):
            answer = await client.post(path, json=body | fields)
            assert answer.status_code == 200
        # what its caller says counts, and where there is no limit nothing is said
        assert [each.get(name) for each in engine.bodies] == [300, 300, 300, 20_000]
        assert (await client.post(path, json=body | {name: 60_000})).status_code == 400
    async with serving(whole(5, 10)) as (engine, _, client):
        await client.post(path, json=body)
        assert name not in engine.bodies[0]


async def test_a_context_bounds_what_is_reserved() -> None:
    fields = {"rate_limit_tokens": "4000/300day"}
    async with (
        scripted(whole(5, 100), max_model_len=1000) as engine,
        gateway_over(configured(engine, **fields)) as (_, client),
    ):
        first = [client.post(CHAT, json=chat()) for _ in range(3)]
        # each is reserved all of a context, to which the engine itself keeps
        assert [each.status_code for each in await asyncio.gather(*first)] == [200] * 3
        assert all("max_tokens" not in body for body in engine.bodies)
        # of what is left then no more than it
        engine.script[:] = [whole(5, 3000)]
        await client.post(CHAT, json=chat(max_tokens=3000))
        engine.script[:] = [whole(5, 100)]
        last = await client.post(CHAT, json=chat())
        assert last.status_code == 200 and 100 < engine.bodies[-1]["max_tokens"] < 700


async def test_several_answers_are_reserved_and_charged() -> None:
    async with serving(whole(5, 400), rate_limit_tokens="1000/300day") as (engine, _, client):
        for fields, status in (
            ({"n": 4, "max_tokens": 300}, 400),
            ({"n": 1, "best_of": 4, "max_tokens": 300}, 400),
            ({"prompt": ["a", "b", "c", "d"], "max_tokens": 300}, 400),
            ({"n": 4, "max_tokens": 100}, 200),
            ({"n": 4, "max_tokens": 150}, 429),
        ):
            answer = await client.post("/v1/completions", json={"prompt": "hi", **fields})
            assert answer.status_code == status, fields
        assert left(answer) == 595
        # of several that say no length each has its part
        engine.script[:] = [whole(5, 40)]
        await client.post("/v1/completions", json={"prompt": "hi", "n": 5})
        assert 0 < engine.bodies[-1]["max_tokens"] <= 595 // 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "step", [*map(refused, (400, 422, 429, 500, 503, 401)), Step(raw=b"what?"), None]
)
async def test_what_no_engine_took_costs_nothing(step: Step | None, stream: bool) -> None:
    fields: dict[str, Any] = {"rate_limit_tokens": "10000/300day", "spend_storage": ""}
    fields |= {"prices": (PRICE,), "keys": (KeyConfig(name="*", budget=BUDGET),)}
    long = [{"role": "user", "content": "word " * 3000}]
    body = chat(messages=long, max_tokens=10, stream=stream)
    async with serving(step or refused(400), max_attempts=1, **fields) as (engine, gateway, client):
        gateway.upstreams.by_name["e1"].draining = step is None
        wrong: list[dict[str, Any]] = [{"model": "of another"}, {"n": "x"}, {"max_tokens": 10**6}]
        for each in [*wrong, {}]:
            answer = await client.post(CHAT, json=body | each)
            assert answer.status_code >= 400 and left(answer) == 10_000, answer.text
        assert len(engine.bodies) == (step is not None)
        assert gateway.spending.status() == {}


@pytest.mark.parametrize(
    ("path", "usage", "charged"),
    [
        (EMBEDDINGS, {"prompt_tokens": 2, "total_tokens": 2}, 2),
        ("/rerank", {"total_tokens": 3}, 3),
        ("/score", {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}, 4),
        # the engine says nothing: as long as its bytes say
        (EMBEDDINGS, None, 1),
    ],
)
async def test_vectors_have_no_output(path: str, usage: Any, charged: int) -> None:
    told = {"model": "m", "data": []} | ({} if usage is None else {"usage": usage})
    step = Step(parts=(json.dumps(told).encode(),), stream=False, delay=0.1)
    body = {"model": "m", "query": "hi", "documents": ["a"], "text_1": "a", "text_2": "b"}
    kinds = {"kinds": {"e1": "vllm"}}
    async with serving(step, rate_limit_tokens="100/300day", **kinds) as (_, _, client):
        asked = {"model": "m", "input": "hi"} if path == EMBEDDINGS else body
        sent = [client.post(path, json=asked) for _ in range(5)]
        found = await asyncio.gather(*sent)
        assert [each.status_code for each in found] == [200] * 5
        assert left(await client.post(path, json=asked)) == 100 - 6 * charged


async def test_what_an_engine_counts_beyond_an_estimate_is_charged(storage: str) -> None:
    """And what is owed is not given away by a smaller request behind it."""
    async with (
        scripted(whole(900, 50), whole(5, 1)) as engine,
        gateway_over(
            configured(engine, rate_limit_tokens="800/300day", rate_limit_storage=storage)
        ) as (gateway, client),
    ):
        first = await client.post(CHAT, json=chat(max_tokens=50))
        assert (first.status_code, left(first)) == (200, 0)
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 429
        limiter = gateway._limiter
        assert limiter is not None
        usage = await limiter.usage("address 127.0.0.1")
        assert usage.windows["tokens"].used == 950


async def test_a_request_that_ends_in_another_window_is_counted_there() -> None:
    now = [1774998000.0]
    ledger = Ledger(None)
    store = LocalStore(ledger)
    budgets = Budgets(
        {"ann": Budget.parse("10/day")}, frozenset(), ledger, store, "EUR", lambda: now[0]
    )
    late = await budgets.reserve("ann", Want.exactly(6))
    now[0] += 7200.0
    other = await budgets.reserve("ann", Want.exactly(5))
    budgets.settle(late, [Cost("e", "m", Used(), 4)])
    budgets.settle(other, [])
    begins = Budget.parse("10/day").begins(now[0])
    assert store.used("ann", begins) == ledger.spent("ann", begins) == 4


async def test_an_answer_that_is_made_later_is_charged_as_it_was_reserved() -> None:
    later = Step(parts=(b'{"id":"r","status":"queued","output":[],"usage":null}',), stream=False)
    async with serving(later, rate_limit_tokens="1000/300day") as (engine, _, client):
        body = {"model": "m", "input": "hi", "background": True}
        found = await client.post(RESPONSES, json={**body, "max_output_tokens": 300})
        assert left(found) == 1000 - 300 - 1
        found = await client.post(RESPONSES, json=body)
        most = engine.bodies[-1]["max_output_tokens"]
        assert 500 < most < 700 and left(found) == 1000 - 300 - 1 - most - 1


async def test_a_picture_takes_of_a_limit_what_is_left_and_refuses_nothing() -> None:
    url = "data:image/png;base64," + "iVBORw0KGgo" * 1000
    part = {"type": "image_url", "image_url": {"url": url}}
    body = chat(messages=[{"role": "user", "content": [part]}], max_tokens=100)
    async with (
        scripted(whole(1500, 100, delay=0.2)) as engine,
        gateway_over(configured(engine, rate_limit_tokens="3300/300day")) as (_, client),
    ):
        found = await asyncio.gather(*[client.post(CHAT, json=body) for _ in range(2)])
        # its tokens are the engine's to count, so some are set apart
        assert [each.status_code for each in found] == [200, 200]
        assert left(await client.post(CHAT, json=chat(max_tokens=101))) == 100


@pytest.mark.parametrize(
    ("path", "words", "then"),
    [
        (CHAT, "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
         "'max_completion_tokens' instead.", {"max_completion_tokens": 4096}),
        (CHAT, "extra fields not permitted: max_tokens", {"max_completion_tokens": 4096}),
        (CHAT, "max_tokens is too large: 4096. This model supports at most 1024 completion tokens",
         {"max_tokens": 512}),
        ("/v1/completions", "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 5 and 4096",
         {"max_tokens": 512}),
        (RESPONSES, "This model's maximum context length is 2048 tokens, and you asked for more",
         {"max_output_tokens": 512}),
    ],
)  # fmt: skip
async def test_an_engine_that_refuses_a_limit_of_ours_is_asked_otherwise(
    path: str, words: str, then: dict[str, int]
) -> None:
    body = json.dumps({"error": {"message": words, "type": "invalid_request_error"}}).encode()
    no = Step(status=400, parts=(body,), stream=False)
    asked = chat(prompt="hi", input="hi")
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    async with serving((no, whole(5, 10)), rate_limit_tokens="50000/300day") as (engine, _, client):
        answer = await client.post(path, json=asked)
        assert answer.status_code == 200 and left(answer) == 50_000 - 15
        told = [{name: sent[name] for name in names if name in sent} for sent in engine.bodies]
        assert len(told) == 2 and told[0] != told[1] == then
        # a name that it does not know it is not told again
        await client.post(path, json=asked)
        if "max_completion_tokens" in then:
            assert "max_tokens" not in engine.bodies[-1]
        # what its caller said is its caller's, and what is wrong otherwise, too
        engine.script[:] = [no]
        limit = next(iter(then))
        assert (await client.post(path, json=asked | {limit: 40})).status_code == 400
        engine.script[:] = [refused(400)]
        assert (await client.post(path, json=asked)).status_code == 400
        assert len(engine.bodies) == 5
