"""``/ui/api/operations``: keys, limits, settings as an operator sees them; no secret, ever."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from paceline.engine.local import LocalEngineClient
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.settings.config import GivenSetting
from paceline.web.operations import MOST_KEYS
from paceline.web.routes import ui_router
from tests.security.keys import ADMIN, USER, bearer
from tests.server.helpers import connect

KEYS = (
    ApiKey(
        "alice", "user", ApiKey.of("alice", "user", USER).digest,
        {"requests": Rate.parse("5/day"), "concurrent": 2},
    ),
    ApiKey.of("root", "admin", ADMIN),
)  # fmt: skip


def app_of(engine: LocalEngineClient, **config: Any) -> Any:
    return create_app(engine, ServerConfig(**({"api_keys": KEYS} | config)), page=ui_router)


async def asked(http: httpx.AsyncClient, query: str = "") -> dict[str, Any]:
    answer = await http.get(f"/ui/api/operations{query}", headers=bearer(ADMIN))
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


async def generate(http: httpx.AsyncClient, tokens: int = 4) -> int:
    body = {"model": "null-model", "prompt": "hey", "max_tokens": tokens, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body, headers=bearer(USER))).status_code


async def test_a_keys_limits_and_what_it_used_of_them(engine: LocalEngineClient) -> None:
    limits = KeyLimits(tokens=Rate.parse("1000/day"))
    async with connect(app_of(engine, limits=limits)) as http:
        before = {key["name"]: key for key in (await asked(http))["keys"]}
        assert before["alice"]["limits"]["requests"] == {
            "limit": 5, "rate": "5/day", "used": 0, "reset_s": 0.0,
        }  # fmt: skip
        assert before["alice"]["own"] == ["concurrent", "requests"]
        # what it has none of its own for is the server's
        assert before["alice"]["limits"]["tokens"]["rate"] == "1000/day"
        assert before["root"]["own"] == [] and before["root"]["limits"]["concurrent"] is None
        assert [await generate(http) for _ in range(6)] == [200] * 5 + [429]
        told = await asked(http)
    after = {key["name"]: key for key in told["keys"]}
    requests, tokens = after["alice"]["limits"]["requests"], after["alice"]["limits"]["tokens"]
    assert requests["used"] == 5 and requests["reset_s"] > 0
    # four prompt tokens (one begins the text) and four of output, what was reserved given back
    assert tokens["used"] == 5 * 8
    assert after["alice"]["limits"]["concurrent"] == {"limit": 2, "used": 0}
    assert after["alice"]["served"] == {
        "requests": 5, "refused": 0, "prompt_tokens": 20, "output_tokens": 20,
    }  # fmt: skip
    assert after["root"]["served"]["requests"] == 0
    assert told["limits"]["refused"] == {"requests": 1, "tokens": 0, "concurrent": 0}
    assert told["limits"]["default"]["tokens"]["rate"] == "1000/day"
    assert told["limits"]["storage"] == "this server"


async def test_looking_counts_nothing(engine: LocalEngineClient) -> None:
    app = app_of(engine)
    async with connect(app) as http:
        metrics = (await http.get("/metrics", headers=bearer(ADMIN))).text
        assert 'tenant="root"' not in metrics
        for _ in range(7):
            told = await asked(http)
        assert told["keys"][0]["limits"]["requests"]["used"] == 0
        # nor does it make series of those who never asked
        assert 'tenant="root"' not in (await http.get("/metrics", headers=bearer(ADMIN))).text


async def test_requests_under_way_are_counted_by_key(engine: LocalEngineClient) -> None:
    app = app_of(engine)
    service = service_of(app)
    async with connect(app) as http:
        running = asyncio.ensure_future(generate(http, 400))
        while not service.under_way.entries():
            assert not running.done(), "it ended unseen"
            await asyncio.sleep(0)
        told = await asked(http)
        assert await running == 200
    alice, root = told["keys"]
    assert alice["running"] == 1 and alice["limits"]["concurrent"]["used"] == 1
    assert root["running"] == 0 and told["state"]["in_flight"] == 1


async def test_no_key_and_no_digest_is_ever_shown(engine: LocalEngineClient) -> None:
    storage = "redis://someone:hush-hush@127.0.0.1:1/0"
    config = {"limits": KeyLimits(requests=Rate(9, 1)), "rate_limit_storage": storage}
    app = app_of(engine, **config)
    async with connect(app) as http:
        text = (await http.get("/ui/api/operations", headers=bearer(ADMIN))).text
    await service_of(app).limiter.close()  # type: ignore[union-attr]
    for secret in (USER, ADMIN, "hush-hush", *(key.digest.hex() for key in KEYS)):
        assert secret not in text
    # nobody answers there, and that is said
    assert '"storage":"Redis","storage_up":false' in text


async def test_who_may_ask(engine: LocalEngineClient) -> None:
    async with connect(app_of(engine)) as http:
        assert (await http.get("/ui/api/operations")).status_code == 401
        answer = await http.get("/ui/api/operations", headers=bearer(USER))
        assert answer.status_code == 403 and "scope admin" in answer.text
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app_of(engine, api_keys=())), base_url="http://127.0.0.1"
    ) as http:
        # without keys it answers on this machine's own names alone
        told = (await http.get("/ui/api/operations")).json()
        assert told["keys"] == [] and told["num_keys"] == 0
        strange = await http.get("/ui/api/operations", headers={"Host": "evil.example"})
        assert strange.status_code == 421


async def test_many_keys_are_found_by_name(engine: LocalEngineClient) -> None:
    many = tuple(
        ApiKey.of(f"team-{number:04}", "user", f"some-key-{number:08}") for number in range(150)
    )
    async with connect(app_of(engine, api_keys=(*many, KEYS[1]))) as http:
        told = await asked(http)
        assert len(told["keys"]) == MOST_KEYS
        assert (told["num_keys"], told["num_found"]) == (151, 151)
        found = await asked(http, "?find=TEAM-014")
        assert [key["name"] for key in found["keys"]] == [f"team-014{n}" for n in range(10)]
        assert found["num_found"] == 10 and found["num_keys"] == 151


async def test_limits_of_keys_are_put_together_once(
    engine: LocalEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each key that is shown."""
    many = tuple(ApiKey.of(f"team-{n}", "user", f"some-key-{n:08}") for n in range(20))
    app = app_of(engine, api_keys=(*many, *KEYS))
    keys = service_of(app).keys
    found, asked_for = keys.limits(), 0

    def limits(_: Any) -> Any:
        nonlocal asked_for
        asked_for += 1
        return found

    monkeypatch.setattr(type(keys), "limits", limits)
    async with connect(app) as http:
        told = await asked(http)
    assert len(told["keys"]) == 22 and asked_for == 1


async def test_what_the_server_is_and_how_it_does(engine: LocalEngineClient) -> None:
    given = (GivenSetting("--drain-timeout", "7", "30"),)
    app = app_of(engine, drain_timeout=7.0, given=given, served_model_names=("tiny", "t*"))
    async with connect(app) as http:
        told = await asked(http)
        assert told["settings"] == [{"flag": "--drain-timeout", "value": "7", "default": "30"}]
        assert told["models"] == ["tiny"] and told["engine"]["model"] == "null-model"
        assert told["engine"]["policy"] == engine.info.policy
        assert told["state"]["ready"] and not told["state"]["draining"]
        service_of(app).draining = True
        state = (await asked(http))["state"]
    assert state["draining"] and not state["ready"] and state["drain_timeout"] == 7.0
