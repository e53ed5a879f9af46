"""axe-core finds nothing on any page, in both themes and states. ``make test-ui`` installs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.live_process import LiveServer, live_server
from tests.ui.conftest import OpenPage, say

AXE = Path(__file__).parents[2] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def violations(page: Any) -> list[str]:
    # by the debugger, which the page's policy does not bind
    page.evaluate(AXE.read_text(encoding="utf-8"))
    # a target half below the header, which stays at the top, would be one too small to hit
    page.evaluate("scrollTo(0, 0)")
    found = page.evaluate("(tags) => axe.run(document, {runOnly: tags})", TAGS)["violations"]
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found
        for node in each["nodes"]
    ]


def test_axe_finds_nothing_in_a_choice_of_models(tmp_path: Path, open_page: OpenPage) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core (make test-ui installs it)")
    with live_server(tmp_path / "log", config={"served_model_names": ["one", "two"]}) as server:
        page = open_page(f"{server.url}/ui/")
        page.get_by_label("What answers").select_option("two")
        assert violations(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(server: LiveServer, open_page: OpenPage, theme: str) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core (make test-ui installs it)")
    page = open_page(f"{server.url}/ui/", color_scheme=theme)
    page.get_by_text("ready").wait_for()
    assert violations(page) == []
    page.get_by_label("Token probabilities").check()
    say(page, "hello", Max_tokens="12")
    page.locator(".story").wait_for()
    assert violations(page) == []
    say(page, "hello", Temperature="-1")
    page.locator("#bad-temperature").wait_for()
    assert violations(page) == []
    page.get_by_role("button", name="Raw request").click()
    assert violations(page) == []
    page.get_by_role("button", name="API key").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Server").click()
    page.get_by_role("cell", name="4096 tokens").wait_for()
    assert violations(page) == []
