"""A Chromium, servers over the null backend, and pages that fail their test when they misbehave.

The browser is Debian's (``scripts/test-services`` installs it). Tests that use it are marked ``ui``
by that; without it they skip, which ``make test-ui`` does not allow.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.live_process import LiveServer, live_server

CHROMIUM = shutil.which("chromium")
# so that it asks for nothing but what the page asks for
ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# what a test makes the server refuse, Chromium notes as well
_REFUSALS = "Failed to load resource: the server responded with a status of "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each file: while it is open, no asynchronous test can run in this process."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the path (scripts/test-services installs it)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("ui") / "log"
    with live_server(log, backend={"step_time": 0.01}) as server:
        yield server


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens a page at an address. When the test ends, every error in its console, every violation
    of its policy and every request to another origin fails the test."""
    faults: list[str] = []
    contexts: list[Any] = []

    def open_at(url: str, **context: Any) -> Any:
        made = browser.new_context(**context)
        contexts.append(made)
        # playwright's own script runs before the page's and is bound by no policy
        made.add_init_script(
            "addEventListener('securitypolicyviolation', (event) => "
            "console.error(`CSP ${event.violatedDirective} ${event.blockedURI}`))"
        )
        page = made.new_page()
        page.set_default_timeout(10_000)
        origin = "/".join(url.split("/")[:3]) + "/"

        def said(message: Any) -> None:
            if message.type in ("error", "warning") and not message.text.startswith(_REFUSALS):
                faults.append(f"console: {message.text}")

        def asked(request: Any) -> None:
            if not request.url.startswith(origin):
                faults.append(f"asked {request.url}")

        page.on("console", said)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", asked)
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not faults


def say(page: Any, text: str, **fields: str) -> None:
    """Send a message from the playground, with what is written in fields of these labels."""
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
