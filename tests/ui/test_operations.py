"""The operations tab in Chromium: what an administrator sees, who else does not, what ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.keys import ADMIN, USER, bearer
from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect
from tests.ui.test_accessibility import AXE, violations
from tests.ui.test_everywhere import batch

KEYS = [
    {"name": "alice", "scope": "user", "key": USER},
    {"name": "root", "scope": "admin", "key": ADMIN},
]


def use_key(page: Any, key: str) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    if not dialog.is_visible():
        # not by the mouse: it opens by itself too, as soon as the server wants a key
        page.get_by_role("button", name="API key").evaluate("(button) => button.click()")
    dialog.get_by_label("Key").fill(key)
    dialog.get_by_role("button", name="Use this key").click()


def generate(server: LiveServer, key: str = USER) -> None:
    body = {"model": "null", "prompt": "hey", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text


def test_keys_and_what_they_used(tmp_path: Path, open_page: OpenPage) -> None:
    config = {
        "limits": {"requests": "7/day"},
        "given": [["--drain-timeout", "3", "30"]],
        "drain_timeout": 3,
    }
    with live_server(tmp_path / "log", keys=KEYS, config=config) as server:
        page = open_page(f"{server.url}/ui/operations")
        page.get_by_role("dialog", name="API key").wait_for()
        use_key(page, USER)
        page.locator(".error").get_by_text("requires a key of scope admin").wait_for()
        use_key(page, ADMIN)
        row = page.get_by_role("row", name="alice")
        row.get_by_text("0 of 7/day").wait_for()
        generate(server)
        row.get_by_text("1 of 7/day").wait_for()
        # the day that it counts in, and the next, in which it fades
        row.get_by_text(re.compile(r"all free in \d+ (h|days)")).wait_for()
        expect(row.locator("td").last).to_have_text("4")
        page.get_by_role("row", name="--drain-timeout 3 30").wait_for()
        page.get_by_role("cell", name="ready", exact=True).wait_for()
        # what is shown of a key is not the key
        assert USER not in page.content() and ADMIN not in page.content()
        page.get_by_label("Name holds").fill("ROO")
        page.get_by_text("1 of 2 keys").wait_for()
        expect(page.get_by_role("row", name="alice")).to_have_count(0)
        # it asks on while the server ends
        page.close()


def test_a_batch_is_cancelled_and_a_drain_is_told(tmp_path: Path, open_page: OpenPage) -> None:
    config = {"batches": {"folder": str(tmp_path / "batches")}, "drain_timeout": 20}
    backend = {"step_time": 0.02}
    with live_server(tmp_path / "log", backend=backend, config=config) as server:
        line = {
            "custom_id": "1", "method": "POST", "url": "/v1/completions",
            "body": {"model": "null", "prompt": "hey", "max_tokens": 3000, "ignore_eos": True},
        }  # fmt: skip
        data = {"file": ("b.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
        file = httpx.post(f"{server.url}/v1/files", files=data).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx.post(f"{server.url}/v1/batches", json=asked).json()["id"]
        page = open_page(f"{server.url}/ui/operations")
        page.get_by_text("This server asks for no key").wait_for()
        row = page.get_by_role("row", name=batch)
        row.get_by_role("button", name="Cancel").click()
        row.get_by_text("cancelled").wait_for()
        assert httpx.get(f"{server.url}/v1/batches/{batch}").json()["status"] == "cancelled"
        # one that runs keeps the server draining for as long as it may
        body = {"model": "null", "prompt": "hey", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.signal()
            page.get_by_text("draining: what runs has 20 s to end").wait_for()
            # it asks on while the server ends
            page.close()


def test_an_answer_that_comes_late_is_not_shown(tmp_path: Path, open_page: OpenPage) -> None:
    """Of what was asked before something else was typed."""
    with live_server(tmp_path / "log", keys=KEYS) as server:
        page = open_page(f"{server.url}/ui/operations")
        use_key(page, ADMIN)
        page.get_by_role("row", name="alice").wait_for()
        held: list[Any] = []
        page.route("**/ui/api/operations?find=ali", lambda route: held.append(route))
        page.get_by_label("Name holds").fill("ali")
        eventually(lambda: page.wait_for_timeout(20) or bool(held))
        page.get_by_label("Name holds").fill("roo")
        page.get_by_text("1 of 2 keys").wait_for()
        page.get_by_role("row", name="root").wait_for()
        with page.expect_response("**/ui/api/operations?find=ali"):
            for route in held:
                route.continue_()
        drawn(page)
        assert page.get_by_role("row", name="alice").count() == 0
        page.close()


def test_batches_of_another_key_are_not_shown(tmp_path: Path, open_page: OpenPage) -> None:
    """Not even where they were asked for with it, and come late."""
    config = {"batches": {"folder": str(tmp_path / "batches")}}
    with live_server(tmp_path / "log", keys=KEYS, config=config) as server:
        name = batch(server, bearer(USER))
        page = open_page(f"{server.url}/ui/server")
        held: list[Any] = []
        page.route(
            "**/v1/batches*", lambda route: route.continue_() if held else held.append(route)
        )
        use_key(page, USER)
        eventually(lambda: page.wait_for_timeout(20) or bool(held))
        use_key(page, ADMIN)
        page.get_by_text("There is none.").wait_for()
        with page.expect_response("**/v1/batches*"):
            held[0].continue_()
        drawn(page)
        assert page.get_by_role("row", name=name).count() == 0
        # with the key that they are of
        use_key(page, USER)
        page.get_by_role("row", name=name).wait_for()
        page.close()


def test_a_narrow_page_does_not_scroll_sideways(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/operations", viewport={"width": 360, "height": 700})
    page.get_by_role("cell", name="ready", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(server: LiveServer, open_page: OpenPage, theme: str) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core (make test-ui installs it)")
    page = open_page(f"{server.url}/ui/operations", color_scheme=theme)
    page.get_by_role("cell", name="ready", exact=True).wait_for()
    assert violations(page) == []
