"""The gateway's page over HTTP: its files, who gets them, and what it is told."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import pytest

from paceline.gateway.settings.config import PriceConfig
from paceline.http.keys import ApiKey
from tests.gateway.cascade.helpers import calibration, cascade, said
from tests.gateway.helpers import CHAT, WHOLE, chat, serving

ADMIN_KEY = "a-key-of-some-length"
ADMIN = ApiKey.of("root", "admin", ADMIN_KEY)
USER = ApiKey.of("ann", "user", "another-key-of-length")
BROWSER = {"Accept": "text/html"}


async def test_the_files_need_no_key_and_what_they_ask_for_one_of_an_admin() -> None:
    async with serving(WHOLE, callers=(ADMIN, USER)) as (_, _, http):
        page = await http.get("/ui/")
        assert page.status_code == 200 and "gateway.js" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert page.headers["x-request-id"] and page.headers["content-encoding"] == "gzip"
        for key, status in (
            ("wrong-key-of-some-length", 401),
            ("another-key-of-length", 403),
            (ADMIN_KEY, 200),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await http.get("/status", headers=headers)).status_code == status
        assert (await http.post("/ui/")).status_code == 405
        assert (await http.get("/ui/v/x/../assets.py")).status_code == 404


async def test_browsers_are_led_there_below_any_path_and_programs_are_not() -> None:
    async with serving(WHOLE) as (_, _, http):
        for path, headers in (("/", BROWSER), ("/ui", {})):
            led = await http.get(path, headers=headers)
            assert led.status_code == 307
            assert httpx.URL(f"http://x/below{path}").join(led.headers["location"]).path == (
                "/below/ui/"
            )
        assert (await http.get("/", headers={"Accept": "*/*"})).status_code == 404


async def test_all_it_sends_is_small() -> None:
    async with serving(WHOLE) as (_, _, http):
        named, sizes = ["/ui/"], dict[str, int]()
        while named:
            path = named.pop()
            async with http.stream("GET", path) as answer:
                sizes[path] = sum([len(part) async for part in answer.aiter_raw()])
            text = (await http.get(path)).text
            found = re.findall(r'(?:(?:href|src)=|from |import\()"(\.{0,2}[^"#]+)"', text)
            named += [
                url
                for name in found
                if (url := str(httpx.URL(path).join(name))) not in {*sizes, *named}
            ]
        assert len(sizes) >= 8 and sum(sizes.values()) < 30_000, sizes


async def test_it_can_be_left_out_and_brought_back_by_a_reload() -> None:
    async with serving(WHOLE, ui=False) as (_, gateway, http):
        for path in ("/ui/", "/ui", "/"):
            assert (await http.get(path, headers=BROWSER)).status_code == 404
        shown = msgspec.structs.replace(gateway.config, ui=True)
        await gateway.reload(shown, gateway.keys)
        assert (await http.get("/ui/")).status_code == 200


@pytest.mark.parametrize(
    ("callers", "host", "status"),
    [
        ((), "evil.example", 421),
        ((), "localhost:8080", 200),
        ((ADMIN,), "evil.example", 200),
    ],
)
async def test_a_name_made_to_point_here_is_refused(
    callers: tuple[ApiKey, ...], host: str, status: int
) -> None:
    async with serving(WHOLE, callers=callers) as (_, _, http):
        assert (await http.get("/ui/", headers={"Host": host})).status_code == status


async def test_the_status_tells_what_models_cost_and_what_their_cascades_decided(
    tmp_path: Path,
) -> None:
    small = said("small", -0.1, -0.2), said("small", -3.0, -0.2)
    prices = (
        PriceConfig(engine="e1", input=1, output=1),
        PriceConfig(engine="e2", input=100, output=100),
    )
    async with cascade(
        small, said("large"), calibration=calibration(tmp_path), gateway={"prices": prices}
    ) as (*_, gateway, http):
        before = (await http.get("/status")).json()
        assert before["models"] == {}
        assert before["cascades"]["chat"]["handed_off"] is None
        for question in ("one", "two"):
            messages = [{"role": "user", "content": question}]
            await http.post(CHAT, json=chat(model="chat", messages=messages))
        told = (await http.get("/status")).json()
        # 10 tokens read and 5 written: twice by the small model, once by the large one
        assert told["models"] == {"small": {"spent": "0.00003"}, "chat": {"spent": "0.0015"}}
        found = told["cascades"]["chat"]
        assert found["answered"] == {"small": 1, "escalated": 1, "large": 0}
        assert found["handed_off"] == 0.5 and found["wasted_tokens"] == 5
        assert found["saved"] == pytest.approx(0.0015 - 0.00003)
        assert found["small"] == "small" and found["mode"] == "cascade"
        assert found["score"] < found["threshold"] < 1 and found["max_loss"] == 0.05
        assert found["audited_loss"] is None and found["alarm"] is False
        metrics = (await http.get("/metrics")).text
        assert 'paceline:gateway_model_spend{model="chat"} 0.0015' in metrics
        # another currency needs a restart, and amounts stay in the one that they were counted in
        other = msgspec.structs.replace(gateway.config, currency="EUR")
        assert "currency needs a restart" in await gateway.reload(other, gateway.keys)
        assert (await http.get("/status")).json()["currency"] == "USD"
