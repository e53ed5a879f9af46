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

from paceline.gateway import Gateway, app, leases
from paceline.gateway.config import KeyConfig, PriceConfig
from paceline.gateway.money import show_amount
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.store import RateStore
from tests.gateway.counting_engine import CountingEngine, counting, prompt_tokens
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import CHAT, chat, configured, gateway_over, refused, until
from tests.gateway.test_hedging import _known
from tests.http.rate_limits.redis_server import RedisServer

pytestmark = pytest.mark.anyio

MILLIONTH: Final = 10**6
LIMIT: Final = 6000
# of a million tokens
PRICE: Final = PriceConfig(input=10, output=100)
BUDGET: Final = "0.50/total"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
MEMORY, REDIS = "memory", "redis"


@pytest.fixture(params=[MEMORY, REDIS])
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
        "retries_per_second": 1000.0, "silence": 30.0, "sse_keep_alive": 0.0, **fields,
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
        told["refuse"] = draw.choice((400, 404, 422, 429, 500, 503))
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
        await until(lambda: not gateway.in_flight and not limiter._giving_back)
        for key, (prompt, output) in enumerate(found):
            window = (await limiter.usage(f"key{key}")).windows["tokens"]
            assert window.used == prompt + output <= LIMIT
            cost = (10 * prompt + 100 * output) * MILLIONTH
            status = gateway.spending.status().get(f"key{key}", {"spent": "0.00"})
            assert status["spent"] == show_amount(cost) and cost <= 5 * 10**11
        # the limits were felt
        assert sum(map(sum, found)) > num_keys * LIMIT // 4
    if storage:
        async with Redis.from_url(storage) as redis:
            for key, (prompt, output) in enumerate(found):
                told = await redis.get(f"paceline:budget:{{key{key}}}:")
                assert int(told or 0) == (10 * prompt + 100 * output) * MILLIONTH


async def test_no_request_takes_a_key_beyond_its_limit(storage: str) -> None:
    await many(storage, 240, None, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("context", [None, 3000])
async def test_ten_thousand_requests_take_no_key_beyond_its_limit(
    storage: str, context: int | None
) -> None:
    await many(storage, 10_000, context, 2)
