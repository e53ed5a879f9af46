"""Prices, budgets and what is kept of both."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.gateway import ModelConfig
from paceline.gateway.billing.budgets import Budgets, Cost, LocalStore, Reservation
from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.settings.config import KeyConfig, PriceConfig, parse_config
from paceline.gateway.settings.prices import Budget, Price, Prices, Used, parse_amount, show_amount
from paceline.http.errors import HttpError
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import Want
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WORDS,
    chat,
    configured,
    gateway_over,
    pieces,
    refused,
    serving,
    until,
)

ONE = 10**12
# 2026-03-31 23:00:00 UTC
LATE_IN_MARCH = 1774998000.0
TODAY = datetime.datetime.now(datetime.UTC).date().isoformat()
ANN = ApiKey.of("ann", "user", "secret-ann")
BOB = ApiKey.of("bob", "user", "secret-bob")
AS_ANN = {"authorization": "Bearer secret-ann"}
AS_BOB = {"authorization": "Bearer secret-bob"}
# of a million tokens, so that 100 tokens of output are 0.01
PRICE = PriceConfig(input="10", cached_input="1", output="100")


def answer(prompt: int = 10, output: int = 100, cached: int = 0, **fields: Any) -> Step:
    usage = {
        "prompt_tokens": prompt, "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    body = {"id": "x", "model": "m", "choices": [], "usage": usage}
    return Step(parts=(json.dumps(body).encode(),), stream=False, **fields)


# ------------------------------------------------------------------------------ money


@given(st.integers(0, 10**12))
def test_amounts_are_read_as_they_are_shown(millionths: int) -> None:
    amount = millionths * 10**6
    assert parse_amount(show_amount(amount), "x") == amount


@pytest.mark.parametrize(
    ("written", "amount"),
    [("2.50", ONE * 5 // 2), (0.1, ONE // 10), (3, 3 * ONE), ("0.000001", 10**6)],
)
def test_amounts(written: str | int | float, amount: int) -> None:
    assert parse_amount(written, "x") == amount


@pytest.mark.parametrize("written", ["x", "-1", "0.0000001", "1e12", "nan", "inf", ""])
def test_what_is_no_amount(written: str) -> None:
    with pytest.raises(ConfigError, match="the price of x"):
        parse_amount(written, "the price of x")


def test_a_price_is_exact() -> None:
    price = Price.per_million(parse_amount("0.15", ""), parse_amount("0.075", ""), 6 * ONE // 10)
    used = Used(prompt=1_000_000, cached=400_000, output=1_000_000)
    assert show_amount(price.of(used)) == "0.72"
    # more cached than there was of a prompt cannot make it cheaper than nothing
    assert price.of(Used(10, 99, 0)) == 10 * price.cached_input
    assert show_amount(0) == "0.00" and show_amount(-ONE // 2) == "-0.50"


def test_the_row_that_names_most_counts() -> None:
    rows = {("", ""): 1, ("", "m"): 2, ("e", ""): 3, ("e", "m"): 4}
    prices = Prices({place: Price(n, n, n) for place, n in rows.items()})
    for place, n in ((("e", "m"), 4), (("e", "x"), 3), (("x", "m"), 2), (("x", "y"), 1)):
        assert prices.find(*place) == Price(n, n, n)
    assert prices.worst([("x", "y"), ("e", "x")], 10, 5) == 45
    assert Prices({}).find("e", "m") is None and not Prices({})


def test_windows_are_of_the_calendar() -> None:
    day, month, total = (Budget.parse(f"5/{name}") for name in ("day", "month", "total"))
    assert [b.begins(LATE_IN_MARCH) for b in (day, month, total)] == [
        "2026-03-31", "2026-03-01", "",
    ]  # fmt: skip
    assert (day.ends_in(LATE_IN_MARCH), month.ends_in(LATE_IN_MARCH)) == (3600.0, 3600.0)
    assert total.ends_in(LATE_IN_MARCH) is None
    assert month.ends_in(LATE_IN_MARCH + 3600) == 30 * 86400.0
    assert str(day) == "5.00/day"
    for text in ("5", "5/hour", "x/day", "-5/day", "5/day "):
        with pytest.raises(ConfigError):
            Budget.parse(text)


# ------------------------------------------------------------------------------ budgets


def budgets(text: str, ledger: Ledger | None = None, **fields: Any) -> Budgets:
    ledger = ledger or Ledger(None)
    soft = frozenset({"ann"}) if fields.pop("soft", False) else frozenset[str]()
    return Budgets({"ann": Budget.parse(text)}, soft, ledger, LocalStore(ledger), "EUR", **fields)


async def test_a_budget_is_reserved_settled_and_begins_anew() -> None:
    now = [LATE_IN_MARCH]
    found = budgets("10/day", wall=lambda: now[0])
    first = await found.reserve("ann", Want.exactly(6 * ONE))
    with pytest.raises(HttpError, match=r"10.00/day EUR: 6.00 are .* may cost 5.00") as caught:
        await found.reserve("ann", Want.exactly(5 * ONE))
    # once the other request has ended, it may fit
    assert caught.value.status == 429 and caught.value.retry_after == 1.0
    found.settle(first, [Cost("e", "m", Used(1, 0, 1), 2 * ONE)])
    with pytest.raises(HttpError, match=r"2.00 are .* resets in 1h0m0s") as caught:
        await found.reserve("ann", Want.exactly(9 * ONE))
    assert caught.value.status == 429 and caught.value.retry_after == 3600.0
    second = await found.reserve("ann", Want.exactly(8 * ONE))
    found.settle(second, [])
    assert found.status("ann") == {"spent": "2.00", "budget": "10.00/day", "currency": "EUR"}
    now[0] += 3600.0
    await found.reserve("ann", Want.exactly(10 * ONE))
    # others have no budget here
    assert await found.reserve("bob", Want.exactly(99 * ONE)) == Reservation("bob", 0, None)


async def test_a_budget_that_never_begins_anew_is_402() -> None:
    found = budgets("1/total")
    with pytest.raises(HttpError) as caught:
        await found.reserve("ann", Want.exactly(2 * ONE))
    assert caught.value.status == 402 and caught.value.retry_after is None


async def test_a_soft_budget_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    found = budgets("1/total", soft=True)
    for _ in range(3):
        assert (await found.reserve("ann", Want.exactly(2 * ONE))).amount == 0
    assert caplog.text.count("budget_nearly_spent key=ann") == 1


async def test_what_a_soft_budget_is_overspent_by_counts() -> None:
    ledger = Ledger(None)
    store = LocalStore(ledger)
    found = Budgets({"ann": Budget.parse("1/total")}, frozenset({"ann"}), ledger, store, "EUR")
    for _ in range(2):
        reserved = await found.reserve("ann", Want.exactly(2 * ONE))
        found.settle(reserved, [Cost("e", "m", Used(1, 0, 1), 2 * ONE)])
    assert await store.take("ann", "", 0, 9 * ONE) == (True, 4 * ONE)
    assert found.status("ann")["spent"] == "4.00"


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), max_size=40))
def test_no_order_of_requests_spends_more_than_there_is(steps: list[tuple[int, int]]) -> None:
    """Unless a request costs more than it was said to at most, which one after it pays for."""

    async def run() -> None:
        ledger = Ledger(None)
        found = budgets("0.0001/total", ledger)
        most = 10**8
        running: list[tuple[Reservation, int]] = []
        for size, share in steps:
            worst = size * 10**6
            with contextlib.suppress(HttpError):
                running.append(
                    (await found.reserve("ann", Want.exactly(worst)), worst * share // 100)
                )
            if len(running) > 3:
                done, cost = running.pop(0)
                found.settle(done, [Cost("e", "m", Used(), cost)])
            reserved = sum(each.amount for each, _ in running)
            assert ledger.spent("ann", "") + reserved <= most
        for each, cost in running:
            found.settle(each, [Cost("e", "m", Used(), cost)])
        assert ledger.spent("ann", "") <= most

    asyncio.run(run())


# ------------------------------------------------------------------------------ the gateway


def spending(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return {
        "prices": (PRICE,),
        "spend_storage": str(tmp_path / "spend.sqlite"),
        "rate_limit_requests": "",
        **fields,
    }


async def test_a_key_spends_its_budget(tmp_path: Path) -> None:
    # 10 of prompt and 100 of output are 0.0101; at most 100 of output are asked for
    keys = (KeyConfig(name="ann", budget="0.025/day"),)
    async with (
        scripted(answer()) as engine,
        gateway_over(configured(engine, **spending(tmp_path, keys=keys)), (ANN, BOB)) as (
            gateway,
            client,
        ),
    ):
        body = chat(max_tokens=100)
        statuses = [
            (await client.post(CHAT, json=body, headers=AS_ANN)).status_code for _ in range(3)
        ]
        assert statuses == [200, 200, 429] and len(engine.bodies) == 2
        refusal = await client.post(CHAT, json=body, headers=AS_ANN)
        assert re.search(
            r"0.025/day USD: 0.0202 are spent or reserved, and this request may cost 0.01",
            refusal.json()["error"]["message"],
        )
        assert 0 < int(refusal.headers["retry-after"]) <= 86400
        # a smaller one fits still, and others have their own
        assert (
            await client.post(CHAT, json=chat(max_tokens=40), headers=AS_ANN)
        ).status_code == 200
        assert (await client.post(CHAT, json=body, headers=AS_BOB)).status_code == 200
        told = gateway.spending.status()
        assert told["ann"]["spent"] == "0.0303" and told["bob"]["spent"] == "0.0101"
        metrics = gateway._admin._render_metrics("")[2].decode()
        assert 'paceline:gateway_spend_today{key="ann"} 0.0303' in metrics
        # of keys that the configuration does not name there is one series
        assert 'paceline:gateway_spend_today{key=""} 0.0101' in metrics and "bob" not in metrics
    # and what was spent is spent in the next process too
    async with serving(answer(), callers=(ANN,), **spending(tmp_path, keys=keys)) as (_, _, client):
        assert (await client.post(CHAT, json=body, headers=AS_ANN)).status_code == 429


async def test_a_small_limit_beside_a_large_one_reserves_the_large_one(tmp_path: Path) -> None:
    keys = (KeyConfig(name="ann", budget="0.025/day"),)
    async with (
        scripted(answer()) as engine,
        gateway_over(configured(engine, **spending(tmp_path, keys=keys)), (ANN,)) as (_, client),
    ):
        asked = chat(max_completion_tokens=1, max_tokens=10_000)
        refusal = await client.post(CHAT, json=asked, headers=AS_ANN)
        assert refusal.status_code == 429 and "may cost 1.00" in refusal.text
        small = chat(max_completion_tokens=1, max_tokens=100)
        assert (await client.post(CHAT, json=small, headers=AS_ANN)).status_code == 200
        assert len(engine.bodies) == 1


async def test_requests_at_once_do_not_spend_one_cent_twice(tmp_path: Path) -> None:
    keys = (KeyConfig(name="*", budget="0.03/total"),)
    async with (
        scripted(answer(delay=0.1)) as engine,
        gateway_over(configured(engine, **spending(tmp_path, keys=keys)), (ANN,)) as (_, client),
    ):
        body = chat(max_tokens=100)
        sent = [client.post(CHAT, json=body, headers=AS_ANN) for _ in range(10)]
        statuses = [found.status_code for found in await asyncio.gather(*sent)]
        # what two of them have reserved may be there again soon
        assert statuses.count(200) == 2 and statuses.count(429) == 8
        assert (await client.post(CHAT, json=body, headers=AS_ANN)).status_code == 402


async def test_what_was_tried_in_vain_costs_nothing_and_what_was_resumed_once(
    tmp_path: Path,
) -> None:
    rest = Step(parts=chat_chunks(WORDS[2:], first_id=2))
    async with (
        scripted(refused(503), metrics=PACELINE_METRICS) as refuses,
        scripted(pieces(2), metrics=PACELINE_METRICS) as dies,
        scripted(rest, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(refuses, dies, lives, **spending(tmp_path)), (ANN,)) as (
            gateway,
            client,
        ),
    ):
        for name, weight in (("e2", 1e6), ("e3", 2e6)):
            gateway.upstreams.by_name[name].load.prefill_tokens += weight
        found = await client.post(CHAT, json=chat(stream=True), headers=AS_ANN)
        assert found.status_code == 200 and len(lives.bodies) == 1
        # three tokens of prompt and five of output, once
        assert gateway.spending.status()["ann"]["spent"] == show_amount(
            3 * 10 * 10**6 + 500 * 10**6
        )


@pytest.mark.parametrize("ids", [True, False])
async def test_who_hangs_up_pays_for_what_was_made(tmp_path: Path, ids: bool) -> None:
    async with (
        scripted(pieces(3, ids=ids, then="stall"), metrics=PACELINE_METRICS) as engine,
        gateway_over(configured(engine, **spending(tmp_path)), (ANN,)) as (gateway, client),
    ):
        body = chat(stream=True)
        async with client.stream("POST", CHAT, json=body, headers=AS_ANN) as found:
            got = b""
            async for data in found.aiter_raw():
                got += data
                if b" a" in got:
                    break
        await until(lambda: gateway.in_flight == 0)
        prompt = 3 if ids else round(len(json.dumps(body["messages"], separators=(",", ":"))) / 4)
        spent = gateway.spending.status()["ann"]["spent"]
        assert spent == show_amount((prompt * 10 + 3 * 100) * 10**6)


async def test_what_was_cached_costs_less(tmp_path: Path) -> None:
    async with (
        scripted(answer(prompt=1000, output=0, cached=900)) as engine,
        gateway_over(configured(engine, **spending(tmp_path)), (ANN,)) as (gateway, client),
    ):
        await client.post(CHAT, json=chat(), headers=AS_ANN)
        assert gateway.spending.status()["ann"]["spent"] == "0.0019"


async def test_over_its_budget_a_key_may_have_a_cheaper_model(tmp_path: Path) -> None:
    models = (
        ModelConfig(name="big", tiers=(("e1:m",),)),
        ModelConfig(name="small", tiers=(("e2:m",),)),
    )
    prices = (
        PriceConfig(engine="e1", input=10, output=100),
        PriceConfig(engine="e2", input=0, output=0),
    )
    keys = (KeyConfig(name="ann", budget="0.015/day", over_budget="small"),)
    fields = spending(tmp_path, keys=keys, prices=prices, models=models)
    async with serving(answer(), answer(), callers=(ANN,), **fields) as (big, _, _, client):
        body = chat(model="big", max_tokens=100)
        assert (await client.post(CHAT, json=body, headers=AS_ANN)).status_code == 200
        found = await client.post(CHAT, json=body, headers=AS_ANN)
        assert found.headers["x-paceline-engine"] == "e2"
        assert found.headers["x-paceline-fallback"] == "m"
        assert found.json()["model"] == "big" and found.json()["paceline"]["fallback"]
        # a caller who wants no other model is refused
        headers = {**AS_ANN, "x-paceline-allow": "retry"}
        assert (await client.post(CHAT, json=body, headers=headers)).status_code == 429
        assert len(big.bodies) == 1


@pytest.mark.parametrize("why", ["cloud", "other API"])
async def test_who_is_over_budget_is_told_so_where_no_other_model_will_do(
    tmp_path: Path, why: str
) -> None:
    """It is at a cloud, and the request is to stay in the house; or it cannot serve it."""
    models = (
        ModelConfig(name="big", tiers=(("e1:m",),), local_only=True),
        ModelConfig(name="small", tiers=(("e2:m",),)),
    )
    prices = (
        PriceConfig(engine="e1", input=10, output=100),
        PriceConfig(engine="e2", input=0, output=0),
    )
    keys = (KeyConfig(name="ann", budget="0.015/day", over_budget="small"),)
    fields = spending(tmp_path, keys=keys, prices=prices, models=models)
    kinds = {"e2": "anthropic"} if why == "other API" else {}
    cloud = {"e2": {"cloud": why == "cloud", "models": ("m",)}}
    path = "/v1/completions" if why == "other API" else CHAT
    async with (
        scripted(answer()) as big,
        scripted(answer()) as small,
        gateway_over(
            configured(big, small, kinds=kinds, engine_fields=cloud, **fields), (ANN,)
        ) as (_, client),
    ):
        body = {**chat(model="big", max_tokens=100), "prompt": "hi"}
        assert (await client.post(path, json=body, headers=AS_ANN)).status_code == 200
        refusal = await client.post(path, json=body, headers=AS_ANN)
        assert refusal.status_code == 429 and "budget" in refusal.text
        assert len(big.bodies) == 1 and not small.bodies


async def test_what_is_reserved_is_enough_for_the_model_of_long_prompts(tmp_path: Path) -> None:
    """Where an engine finds a prompt too long, it goes to a dearer one."""
    models = (
        ModelConfig(name="chat", tiers=(("e1:m",),), length_over={"1000": "long"}),
        ModelConfig(name="long", tiers=(("e2:m",),)),
    )
    prices = (
        PriceConfig(engine="e1", input=0, output=1),
        PriceConfig(engine="e2", input=0, output=1000),
    )
    keys = (KeyConfig(name="ann", budget="0.015/day"),)
    fields = spending(tmp_path, keys=keys, prices=prices, models=models)
    async with serving(answer(), answer(), callers=(ANN,), **fields) as (short, long, _, client):
        body = chat(model="chat", max_tokens=100)
        refusal = await client.post(CHAT, json=body, headers=AS_ANN)
        assert refusal.status_code == 429 and "0.1" in refusal.text
        body["max_tokens"] = 10
        assert (await client.post(CHAT, json=body, headers=AS_ANN)).status_code == 200
        assert len(short.bodies) == 1 and not long.bodies


async def test_a_key_may_use_its_models_alone() -> None:
    keys = (KeyConfig(name="ann", models=("m",)),)
    async with (
        scripted(answer(), models=("m", "n")) as engine,
        gateway_over(configured(engine, keys=keys), (ANN, BOB)) as (_, client),
    ):
        assert (await client.post(CHAT, json=chat(), headers=AS_ANN)).status_code == 200
        refusal = await client.post(CHAT, json=chat(model="n"), headers=AS_ANN)
        assert refusal.status_code == 403 and "may use m" in refusal.text
        assert (await client.post(CHAT, json=chat(model="n"), headers=AS_BOB)).status_code == 200
        for headers, names in ((AS_ANN, ["m"]), (AS_BOB, ["m", "n"])):
            listed = (await client.get("/v1/models", headers=headers)).json()["data"]
            assert [entry["id"] for entry in listed] == names
        assert (await client.get("/v1/models/n", headers=AS_ANN)).status_code == 404


ENGINE = '[[engines]]\nname = "a"\nurl = "http://127.0.0.1:8001"\n'
ROW = "[[prices]]\ninput = 1\noutput = 2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[keys]]\nname = "x"\nbudget = "1/day"\n', "need a price of a: give 0"),
        (ROW + ROW, "two prices of engine '' and model ''"),
        (ROW.replace("1", '"x"'), "must be an amount"),
        (ROW + 'engine = "z"\n', "engine 'z', which is not configured"),
        ('[[keys]]\nname = "x"\n[[keys]]\nname = "x"\n', "the same name"),
        (ROW + '[[keys]]\nname = "x"\nbudget = "1/hour"\n', "AMOUNT/day"),
        ('[[keys]]\nname = "x"\nover_budget = "y"\n', "no budget"),
        (
            '[[models]]\nname = "m"\ntiers = [["a"]]\n[[keys]]\nname = "x"\nmodels = ["n"]\n',
            "there is no model 'n'",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config((ENGINE + text).encode())


async def test_nothing_is_kept_where_there_are_no_prices(tmp_path: Path) -> None:
    path = tmp_path / "spend.sqlite"
    async with serving(answer(), spend_storage=str(path)) as (_, _, client):
        assert (await client.post(CHAT, json=chat())).status_code == 200
    assert not path.exists()
    priced = spending(tmp_path, spend_storage="", currency="EUR")
    async with serving(replace(answer(), delay=0.0), **priced) as (_, _, client):
        await client.post(CHAT, json=chat())
        told = (await client.get("/status")).json()["spend"]
        assert told == {"anybody": {"spent": "0.0101", "budget": None, "currency": "EUR"}}
    assert not path.exists()
