"""The page of promises, in Chromium, with the null backend behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.keys import ADMIN, KEYS, USER
from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect
from tests.ui.test_accessibility import violations
from tests.ui.test_operations import use_key


def ask(server: LiveServer, headers: Any = None, **body: Any) -> None:
    url = f"{server.url}/v1/completions"
    body = {"model": "null", "prompt": "hello", "max_tokens": 8} | body
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200


def cells(page: Any, region: str, row: str) -> list[str]:
    """Of the row of a table that begins with a name."""
    table = page.get_by_role("region", name=region, exact=True)
    return list(
        table.get_by_role("row", name=re.compile(f"^{row}")).locator("td").all_inner_texts()
    )


def test_what_was_kept_and_what_was_missed(server: LiveServer, open_page: OpenPage) -> None:
    ask(server, slo={"class": "interactive", "ttft_ms": 10_000})
    for _ in range(3):
        ask(server, slo={"class": "batch", "ttft_ms": 0.001})
    page = open_page(f"{server.url}/ui/promises")
    page.get_by_role("button", name="Since start").click()
    page.get_by_role("region", name="Classes", exact=True).wait_for()
    # running, waiting, ended, met, since start, missed
    kept, missed = ["1", "100.0 %", "100.0 %", "–"], ["3", "0.0 %", "0.0 %", "ttft 3"]
    eventually(lambda: cells(page, "Classes", "interactive")[2:] == kept)
    eventually(lambda: cells(page, "Classes", "batch")[2:] == missed)
    # and goes on by itself, in the time that was chosen
    ask(server, max_tokens=400, slo={"class": "interactive", "ttft_ms": 10_000})
    eventually(lambda: cells(page, "Classes", "interactive")[2:4] == ["2", "100.0 %"])
    chosen = page.get_by_role("button", name="Since start")
    expect(chosen).to_have_attribute("aria-pressed", "true")
    # a step of the null backend takes 10 ms; of the first few nothing was predicted
    took = page.get_by_role("row", name=re.compile("^A step takes")).locator("td").inner_text()
    assert took.endswith("ms") and float(took.split()[0]) >= 9
    expect(page.locator(".page .now dd").first).to_have_text("40.0 %")


def test_it_wants_a_key_of_scope_admin(tmp_path: Path, open_page: OpenPage) -> None:
    keys = [{"name": KEYS[0].name, "scope": "user", "key": USER}]
    keys.append({"name": "root", "scope": "admin", "key": ADMIN})
    with live_server(tmp_path / "log", backend={"step_time": 0.001}, keys=keys) as server:
        ask(server, {"Authorization": f"Bearer {USER}"})
        page = open_page(f"{server.url}/ui/promises")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill(USER)
        dialog.get_by_role("button", name="Use this key").click()
        page.get_by_text("requires a key of scope admin; this one has user").wait_for()
        assert page.get_by_role("region", name="Classes", exact=True).count() == 0
        page.get_by_role("link", name="What if").click()
        page.get_by_text("what-if requires a key of scope admin; this one has user").wait_for()
        assert page.get_by_role("button", name=re.compile("^Simulate")).count() == 0
        page.get_by_role("link", name="Promises").click()
        page.get_by_role("button", name="API key").click()
        dialog.get_by_label("Key").fill(ADMIN)
        dialog.get_by_role("button", name="Use this key").click()
        page.get_by_role("button", name="Since start").click()
        # a key's name is a tenant's
        page.get_by_role("region", name="Tenants", exact=True).wait_for()
        eventually(lambda: cells(page, "Tenants", KEYS[0].name)[1:2] == ["1"])
        # it asks on while the server ends
        page.close()


def test_what_another_key_was_refused_is_not_this_ones(tmp_path: Path, open_page: OpenPage) -> None:
    """Where the refusal comes behind the other key's answer."""
    keys = [{"name": KEYS[0].name, "scope": "user", "key": USER}]
    keys.append({"name": "root", "scope": "admin", "key": ADMIN})
    with live_server(tmp_path / "log", backend={"step_time": 0.001}, keys=keys) as server:
        ask(server, {"Authorization": f"Bearer {USER}"})
        page = open_page(f"{server.url}/ui/server")
        use_key(page, USER)
        page.get_by_role("cell", name="4096 tokens").wait_for()
        held: list[Any] = []
        page.route(
            "**/ui/api/promises*", lambda route: route.continue_() if held else held.append(route)
        )
        page.get_by_role("link", name="Promises").click()
        eventually(lambda: page.wait_for_timeout(20) or bool(held))
        use_key(page, ADMIN)
        page.get_by_role("heading", name="Kept, by class").wait_for()
        with page.expect_response(lambda answer: answer.status == 403):
            held[0].continue_()
        drawn(page)
        assert page.get_by_role("heading", name="Kept, by class").is_visible()
        page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_no_number_is_cut_off(server: LiveServer, open_page: OpenPage, width: int) -> None:
    """Of the tables with three columns, which stand beside each other where there is room."""
    for _ in range(3):
        ask(server, slo={"class": "interactive", "ttft_ms": 10_000})
    page = open_page(f"{server.url}/ui/promises", viewport={"width": width, "height": 700})
    page.get_by_role("button", name="Since start").click()
    for name in ("Times", "Predictions"):
        table = page.locator(f'.scroll[aria-label="{name}"]')
        table.wait_for()
        assert table.evaluate("(each) => each.scrollWidth <= each.clientWidth"), name


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits(server: LiveServer, open_page: OpenPage, width: int) -> None:
    ask(server)
    page = open_page(f"{server.url}/ui/promises", viewport={"width": width, "height": 700})
    page.get_by_role("heading", name="Steps and what they cost").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(server: LiveServer, open_page: OpenPage, theme: str) -> None:
    ask(server, slo={"class": "batch", "ttft_ms": 0.001})
    page = open_page(f"{server.url}/ui/promises", color_scheme=theme)
    page.get_by_role("heading", name="The last hour").wait_for()
    # until there is a line to see
    page.locator("polyline").first.wait_for(state="attached", timeout=20_000)
    assert violations(page) == []


def test_a_server_that_is_gone_is_told(tmp_path: Path, open_page: OpenPage) -> None:
    with live_server(tmp_path / "log", backend={"step_time": 0.001}) as server:
        ask(server)
        page = open_page(f"{server.url}/ui/promises")
        page.get_by_role("heading", name="Kept, by class").wait_for()
        # what a server that is gone does to a browser is no fault of the page
        page.route("**/*", lambda route: route.fulfill(status=503, body="gone"))
        page.get_by_role("alert").get_by_text("gone").wait_for()
        expect(page.get_by_role("heading", name="Kept, by class")).to_be_visible()
