"""A Chromium, servers over the null backend, and pages that fail their test when they misbehave.

The browser is Debian's (``scripts/test-services`` installs it). Tests that use it are marked ``ui``
by that; without it they skip, which ``make test-ui`` does not allow.

``PACELINE_UI_SLOW=6`` gives pages a sixth of the processor and lets each answer come late, as on a
loaded machine: a test that looks before the page has drawn fails there, and not once in fifty runs.
"""

from __future__ import annotations

import os
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
# how many times as long a page's own work takes; 1: as long as it takes
SLOWNESS = float(os.environ.get("PACELINE_UI_SLOW", "1"))
# what a page waits for each answer of a server then, so that it draws before it knows
_LATENCY_MS = 150
# a wait ends with what it waits for: a long one costs nothing, and a busy machine may need it
_PATIENCE_MS = 20_000
# what a test makes the server refuse, Chromium notes as well
_REFUSALS = "Failed to load resource: the server responded with a status of "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each file: while it is open, no asynchronous test can run in this process."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the path (scripts/test-services installs it)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("ui") / "log"
    with live_server(log, backend={"step_time": 0.01}) as server:
        yield server


def slowed(context: Any, page: Any) -> None:
    """Make the page as slow as ``PACELINE_UI_SLOW`` says, by Chromium's own means."""
    told = context.new_cdp_session(page)
    told.send("Emulation.setCPUThrottlingRate", {"rate": SLOWNESS})
    told.send("Network.enable")
    told.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": _LATENCY_MS,
            "downloadThroughput": -1,
            "uploadThroughput": -1,
        },
    )


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
        page.set_default_timeout(_PATIENCE_MS)
        if SLOWNESS > 1:
            slowed(made, page)
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


def expect(what: Any) -> Any:
    """Playwright's assertions about a page or a part of it, which wait until they hold."""
    from playwright.sync_api import expect as waiting

    return waiting(what)


def drawn(page: Any) -> None:
    """Wait until the page has drawn what it knows, and observers of its sizes had their turn."""
    page.evaluate("new Promise((on) => requestAnimationFrame(() => requestAnimationFrame(on)))")


def say(page: Any, text: str, **fields: str) -> None:
    """Send a message from the playground, with what is written in fields of these labels."""
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
