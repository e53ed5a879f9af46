"""The gateway's page in Chromium: engines, models, cascades and keys, for an administrator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gateway.settings.config import KeyConfig, PoolConfig, PriceConfig
from paceline.http.keys import ApiKey
from tests.gateway.cascade.helpers import calibration, cascade, said
from tests.gateway.helpers import CHAT, chat
from tests.security.keys import ADMIN, USER, bearer
from tests.server.live_process import eventually
from tests.ui.conftest import OpenPage, expect
from tests.ui.test_accessibility import AXE, violations
from tests.ui.test_everywhere import _BROKEN
from tests.ui.test_operations import use_key

KEYS = (ApiKey.of("alice", "user", USER), ApiKey.of("root", "admin", ADMIN))
PRICES = tuple(PriceConfig(engine=f"e{n}", input=n**9, output=n**9) for n in (1, 2))


@contextmanager
def served(folder: Path, callers: tuple[ApiKey, ...], **config: Any) -> Iterator[str]:
    """The address of a gateway whose small model was sure once, and unsure once."""
    path = calibration(folder)
    small = said("small", -0.1, -0.2), said("small", -3.0, -0.2)
    found: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        told = {"prices": PRICES, **config}
        async with cascade(small, said("large"), calibration=path, keys=callers, gateway=told) as (
            *_,
            http,
        ):
            for question in ("one", "two"):
                messages = [{"role": "user", "content": question}]
                body = chat(model="chat", messages=messages)
                answer = await http.post(CHAT, json=body, headers=bearer(USER) if callers else {})
                assert answer.status_code == 200, answer.text
            found.append(str(http.base_url).rstrip("/"))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield found[0]
    over.set()
    thread.join(20)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    budget = (KeyConfig(name="alice", budget="5/day"),)
    with served(tmp_path_factory.mktemp("page"), KEYS, keys=budget) as address:
        yield address


def test_without_keys_it_shows_all_at_once(tmp_path: Path, open_page: OpenPage) -> None:
    with served(tmp_path, (), pools=(PoolConfig(name="p"),)) as address:
        page = open_page(f"{address}/ui/")
        page.get_by_role("region", name="Table of engines").wait_for()
        page.get_by_text("p: its controller was not heard yet").wait_for()
        eventually(lambda: row(page, "models", "chat")[0] == "Spent 0.00768 USD")


def shown(open_page: OpenPage, gateway: str, **context: Any) -> Any:
    page = open_page(f"{gateway}/", **context)
    page.get_by_role("dialog", name="API key").wait_for()
    use_key(page, ADMIN)
    page.get_by_role("region", name="Table of engines").wait_for()
    return page


def row(page: Any, table: str, name: str) -> list[str]:
    region = page.get_by_role("region", name=f"Table of {table}")
    heads = region.locator("thead th").all_inner_texts()
    line = region.locator("tbody tr", has=page.get_by_role("rowheader", name=name, exact=True))
    line.wait_for()
    return [*map(" ".join, zip(heads[1:], line.locator("td").all_inner_texts(), strict=True))]


def test_an_administrator_sees_what_is_spent_saved_and_handed_off(
    gateway: str, open_page: OpenPage
) -> None:
    page = shown(open_page, gateway)
    expect(page).to_have_url(f"{gateway}/ui/")
    page.locator(".state", has_text="ready").wait_for()
    # each look at it is whole, and the next comes soon
    eventually(lambda: row(page, "models", "chat")[11] == "Wasted tokens 5")
    told = row(page, "models", "chat")
    assert told[:7] == [
        "Spent 0.00768 USD", "Saved 0.00765 USD", "Small first small (cascade)",
        "Handed off 50 %", "Small 1", "Escalated 1", "Large 0",
    ]  # fmt: skip
    assert told[9] == "Bound 0.05"
    assert row(page, "models", "small")[0] == "Spent 0.00003 USD"
    eventually(lambda: "State ready" in row(page, "engines", "e1"))
    assert row(page, "keys", "alice") == ["Spent 0.00771 USD", "Budget 5.00/day"]


def test_it_follows_and_says_what_goes_wrong(gateway: str, open_page: OpenPage) -> None:
    page = shown(open_page, gateway)
    drained = httpx.post(f"{gateway}/admin/engines/e1/drain", headers=bearer(ADMIN))
    assert drained.status_code == 200
    engines = page.get_by_role("region", name="Table of engines")
    engines.get_by_text("draining", exact=True).first.wait_for()
    httpx.post(f"{gateway}/admin/engines/e1/undrain", headers=bearer(ADMIN))
    engines.get_by_text("draining", exact=True).first.wait_for(state="detached")
    page.route("**/status", lambda route: route.fulfill(status=502, body="nothing is there"))
    page.get_by_role("alert").get_by_text("nothing is there").wait_for()
    page.locator(".state", has_text="refused").wait_for()
    expect(engines).to_be_hidden()


def test_a_key_that_is_no_admins_is_told_so(gateway: str, open_page: OpenPage) -> None:
    page = open_page(f"{gateway}/ui/")
    use_key(page, USER)
    page.locator(".error").get_by_text("scope admin").wait_for()
    assert page.get_by_role("region", name="Table of models").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_it(gateway: str, open_page: OpenPage, theme: str) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core (make test-ui installs it)")
    page = open_page(f"{gateway}/ui/", color_scheme=theme)
    page.get_by_role("dialog", name="API key").wait_for()
    assert violations(page) == []
    use_key(page, ADMIN)
    page.get_by_role("region", name="Table of engines").wait_for()
    assert violations(page) == []
    page.get_by_label("Theme").select_option("dark" if theme == "light" else "light")
    assert violations(page) == []


@pytest.mark.parametrize(("width", "ratio"), [(640, 2), (360, 1)], ids=["zoomed", "phone"])
def test_nothing_of_it_is_lost_in_a_narrow_page(
    gateway: str, open_page: OpenPage, width: int, ratio: int
) -> None:
    size = {"width": width, "height": 700}
    page = shown(open_page, gateway, viewport=size, device_scale_factor=ratio)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_BROKEN, "thead th") == []
    # tables scroll by themselves, by keys too
    table = page.get_by_role("region", name="Table of models")
    table.focus()
    page.keyboard.press("ArrowRight")
    eventually(lambda: table.evaluate("(table) => table.scrollLeft") > 0)
