"""``/ui/api/promises``: the arithmetic of ``paceline top``, of which time, and for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import null_client
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.observability.snapshot.frame import make_frame
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics
from paceline.web.promises import Promises
from paceline.web.routes import ui_router
from tests.cli.watch.test_top import counts, scrape
from tests.server.helpers import VOCAB

PATH = "/ui/api/promises"


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.002))
    yield client
    await client.close()


def at(engine: LocalEngineClient, **config: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(**config), page=ui_router)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=20
    )


async def ask(http: httpx.AsyncClient, count: int, **body: Any) -> None:
    for _ in range(count):
        body = {"model": "null", "prompt": "hello", "max_tokens": 6} | body
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_it_says_what_top_says_of_the_same_numbers(engine: LocalEngineClient) -> None:
    app = create_app(engine, ServerConfig(metrics_tenants=3, price_per_hour=2.0), page=ui_router)
    metrics = service_of(app).metrics
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        await ask(http, 3, user="ada", slo={"class": "interactive", "ttft_ms": 10_000})
        await ask(http, 2, slo={"class": "batch", "ttft_ms": 0.001})
        told = (await http.get(f"{PATH}?seconds=0")).json()["frame"]
        text = (await http.get("/metrics")).text
    seconds = told["interval"]
    of_text = asdict(
        make_frame(metrics.at_start(), parse_metrics(text, metrics.at_start().time + seconds))
    )
    # money and the age of a copy go on by themselves
    for name in ("cost_per_million_tokens", "metrics_age", "interval"):
        assert told.pop(name) == pytest.approx(of_text.pop(name), rel=0.5, abs=0.01)
    assert _plain(told) == _plain(of_text)
    assert told["attainment"] == pytest.approx(0.6)
    classes = {row["name"]: row for row in told["classes"]}
    assert classes["interactive"]["attainment"] == 1.0 and classes["interactive"]["ended"] == 3
    assert classes["batch"]["violations"] == {"ttft": 2}
    assert {row["name"] for row in told["tenants"]} >= {"ada"}


def _plain(value: Any) -> Any:
    """Numbers to nine digits, tuples as lists: what JSON makes of it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


async def test_a_reading_is_what_a_scrape_says(engine: LocalEngineClient) -> None:
    app = create_app(engine, ServerConfig(metrics_tenants=3), page=ui_router)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        await ask(http, 2, user="ada")
    metrics = service_of(app).metrics
    told = metrics.read()
    scraped = parse_metrics(metrics.render().decode(), told.time).samples
    assert len(told.samples) > 60
    for name, samples in told.samples.items():
        assert samples == scraped[name], name
    # series that appeared since are there the next time, and labels are not made anew
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        await ask(http, 1, user="bob", slo={"class": "interactive"})
    again = metrics.read().samples
    scraped = parse_metrics(metrics.render().decode(), 0.0).samples
    assert again == {name: scraped[name] for name in again}
    assert {"interactive"} < {
        labels["slo_class"] for labels, _ in again["paceline:slo_requests_total"]
    }
    before = told.samples["paceline:step_seconds_total"][0][0]
    assert again["paceline:step_seconds_total"][0][0] is before


class _Watched:
    """Metrics of which each step was done in a second, and one request of two was good."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_read = 0

    def promises(self) -> Promises:
        return Promises(self, clock=lambda: self.now)

    def at_start(self) -> Scrape:
        return Scrape(100.0, {})

    def read(self) -> Scrape:
        self.num_read += 1
        seconds = int(self.now - 100.0)
        return scrape(self.now, *counts(seconds, 10, 10, seconds // 2, seconds))


def test_of_which_time_it_is() -> None:
    watched = _Watched()
    promises = watched.promises()
    watched.now = 400.0
    # the first who looks: nothing of the last minute is known
    first = promises.tell(60)
    assert first["frame"]["interval"] == 300.0 and first["points"] == []
    for _ in range(700):
        watched.now += 1.0
        minute = promises.tell(60)
    assert 60.0 <= minute["frame"]["interval"] <= 66.0
    assert minute["frame"]["steps_per_s"] == pytest.approx(1.0)
    ten = promises.tell(600)
    assert 600.0 <= ten["frame"]["interval"] <= 662.0
    assert promises.tell(0)["frame"]["interval"] == 1000.0 == ten["uptime"]
    # a point for every five seconds
    assert len(ten["points"]) == 140 and ten["points"][-1]["ago"] < 5.0
    assert ten["points"][-1]["attainment"] == pytest.approx(0.5, abs=0.02)
    # nobody looked for ten minutes: what was read before is no minute's
    watched.now += 600.0
    late = promises.tell(60)
    assert late["frame"]["interval"] == 1600.0, "since start, until there is something newer"
    watched.now += 7.0
    assert promises.tell(60)["frame"]["interval"] == 7.0


def test_what_is_kept_is_bounded() -> None:
    watched = _Watched()
    promises = watched.promises()
    for _ in range(750):
        watched.now += 5.0
        told = promises.tell(60)
    assert len(told["points"]) == 720


def test_the_last_hour_is_an_hour() -> None:
    """However seldom somebody looked."""
    watched = _Watched()
    promises = watched.promises()
    for _ in range(400):
        watched.now += 60.0
        told = promises.tell(60)
    assert len(told["points"]) == 60 and told["points"][0]["ago"] < 3600.0
    watched.now += 1800.0
    told = promises.tell(60)
    assert [point["ago"] for point in told["points"][:2]] == [3540.0, 3480.0]


def test_those_who_look_at_once_share_a_reading() -> None:
    watched = _Watched()
    promises = watched.promises()
    watched.now += 100.0
    told = [promises.tell(window) for window in (60, 600, 0, 60)]
    assert watched.num_read == 1 and told[0] == told[3]
    assert {each["frame"]["interval"] for each in told} == {100.0}
    watched.now += 0.9
    assert promises.tell(60)["frame"] == told[0]["frame"] and watched.num_read == 1
    watched.now += 0.2
    assert promises.tell(0)["frame"]["interval"] == pytest.approx(101.1)
    assert watched.num_read == 2


@pytest.mark.parametrize("seconds", ["61", "-1", "x", "", "60.0"])
async def test_another_time_is_refused(engine: LocalEngineClient, seconds: str) -> None:
    async with at(engine) as http:
        got = await http.get(f"{PATH}?seconds={seconds}")
    assert got.status_code == 400 and "60, 600, 0" in got.json()["error"]["message"]


async def test_who_may_see_it(engine: LocalEngineClient) -> None:
    keys = (ApiKey.of("root", "admin", "admin-key-1"), ApiKey.of("ada", "user", "user-key-12"))
    async with at(engine, api_keys=keys) as http:
        for key, status in (("", 401), ("user-key-12", 403), ("admin-key-1", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            got = await http.get(PATH, headers=headers)
            assert got.status_code == status
        assert got.headers["cache-control"] == "no-store"
    async with at(engine) as http:
        assert (await http.get(PATH, headers={"Host": "evil.example"})).status_code == 421
    async with at(engine, ui=False) as http:
        assert (await http.get(PATH)).status_code == 404
