"""Whose a trace, a job and its runs are."""

from __future__ import annotations

import asyncio

from paceline.http.keys import ApiKey
from paceline.web.what_if.storage import MOST_PLACES
from tests.web.what_if.helpers import CARD, PATH, SLEEPS, TRACE, Ask, configured, until


async def test_callers_know_nothing_of_each_other(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    one, other = ({"X-Paceline-Session": name} for name in ("one", "other"))
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    http = asker.http
    sent = await http.put(f"{PATH}/trace", content=TRACE, headers=one)
    assert sent.status_code == 200
    refused = await http.post(PATH, json=body, headers=other)
    assert refused.status_code == 400 and "no trace was uploaded" in refused.text
    assert (await http.post(PATH, json=body, headers=one)).status_code == 200
    told = (await http.get(PATH, headers=other)).json()
    assert told["job"] == {"status": "idle"} and told["trace_bytes"] is None and told["busy"]
    mine = (await http.get(PATH, headers=one)).json()
    assert mine["job"]["status"] == "running" and not mine["busy"]
    # it can neither be begun beside nor ended, and others may send theirs meanwhile
    assert (await http.put(f"{PATH}/trace", content="x" + TRACE, headers=other)).status_code == 200
    beside = await http.post(PATH, json=body, headers=other)
    assert beside.status_code == 409 and "another caller's" in beside.text
    assert (await http.delete(PATH, headers=other)).json() == {"status": "idle"}
    assert (await http.get(PATH, headers=one)).json()["job"]["status"] == "running"
    # each has its own trace
    root = asker.root
    assert [(root / place / "trace").read_text()[:2] for place in "12"] == ["TI", "xT"]
    assert (await http.delete(PATH, headers=one)).json()["status"] == "cancelled"
    bad = await http.get(PATH, headers={"X-Paceline-Session": "../x"})
    assert bad.status_code == 400 and "x-paceline-session" in bad.text


async def test_another_key_is_another_caller(ask: Ask) -> None:
    keys = tuple(ApiKey.of(name, "admin", f"{name}-key-12345") for name in ("ada", "bob"))
    asker = ask(api_keys=keys)
    ada, bob = (
        {"Authorization": f"Bearer {key.name}-key-12345", "X-Paceline-Session": "same"}
        for key in keys
    )
    await asker.http.put(f"{PATH}/trace", content=TRACE, headers=ada)
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    assert (await asker.http.post(PATH, json=body, headers=ada)).status_code == 200
    for _ in range(400):
        job = (await asker.http.get(PATH, headers=ada)).json()["job"]
        if job["status"] != "running":
            break
        await asyncio.sleep(0.05)
    assert job["status"] == "done"
    for who, query, status in (
        (ada, "run=0", 200), (ada, "run=0&job=1", 200), (ada, "run=0&job=2", 404),
        (ada, "run=1", 404), (ada, "run=x", 400), (ada, "run=0&job=-1", 400), (bob, "run=0", 404),
    ):  # fmt: skip
        got = await asker.http.get(f"{PATH}/timeline?{query}", headers=who)
        assert got.status_code == status, (query, got.text[:200])
    assert (await asker.http.get(PATH, headers=bob)).json()["job"] == {"status": "idle"}


async def test_the_place_of_who_asked_longest_ago_is_given_up(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))

    async def send(name: str) -> int:
        headers = {"X-Paceline-Session": name}
        return (await asker.http.put(f"{PATH}/trace", content=TRACE, headers=headers)).status_code

    for number in range(MOST_PLACES):
        assert await send(f"s{number}") == 200
    # the oldest of them has a job, and the next one has asked just now
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    first = {"X-Paceline-Session": "s0"}
    assert (await asker.http.post(PATH, json=body, headers=first)).status_code == 200
    await asker.http.get(PATH, headers={"X-Paceline-Session": "s1"})
    assert await send("late") == 200
    kept = {}
    for name in ("s0", "s1", "s2", "s3", "late"):
        told = (await asker.http.get(PATH, headers={"X-Paceline-Session": name})).json()
        kept[name] = told["trace_bytes"] is not None
    assert kept == {"s0": True, "s1": True, "s2": False, "s3": True, "late": True}
    root = asker.root
    await until(lambda: len(list(root.glob("*/trace"))) == MOST_PLACES)


async def test_a_key_with_many_sessions_costs_others_nothing(ask: Ask) -> None:
    keys = tuple(ApiKey.of(name, "admin", f"{name}-key-12345") for name in ("ada", "bob"))
    asker = ask(api_keys=keys)

    def of(key: str, session: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}-key-12345", "X-Paceline-Session": session}

    async def keeps(key: str, session: str) -> bool:
        told = (await asker.http.get(PATH, headers=of(key, session))).json()
        return told["trace_bytes"] is not None

    assert (await asker.send(**of("bob", "one"))).status_code == 200
    for number in range(MOST_PLACES + 2):
        assert (await asker.send(**of("ada", f"s{number}"))).status_code == 200
    # the oldest of her own went, three of them
    assert await keeps("bob", "one")
    assert [await keeps("ada", f"s{number}") for number in range(5)] == [False] * 3 + [True] * 2
