"""What holds on every page: axe-core in each state and theme, a zoom of 200 %, keys alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.keys import ADMIN, USER, bearer
from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect, say
from tests.ui.test_accessibility import violations

TABS = ("Playground", "Timeline", "Promises", "What if", "Server", "Operations")
THEMES = pytest.mark.parametrize("theme", ["light", "dark"])
CORE = {"timeline": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
KEYS = [
    {"name": "alice", "scope": "user", "key": USER},
    {"name": "root", "scope": "admin", "key": ADMIN},
]


def batch(server: LiveServer, headers: dict[str, str] | None = None) -> str:
    """One that runs for a long time."""
    body = {"model": "null", "prompt": "hey", "max_tokens": 3000, "ignore_eos": True}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    data = {"file": ("b.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        file = http.post("/v1/files", files=data).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(http.post("/v1/batches", json=asked).json()["id"])


def generate(server: LiveServer, tokens: int = 20, **more: Any) -> None:
    body = {"model": "null", "prompt": "x" * 90, "max_tokens": tokens} | more
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with everything that the page shows."""
    folder = tmp_path_factory.mktemp("everywhere")
    config = {
        "batches": {"folder": str(folder / "batches")},
        "given": [["--drain-timeout", "3", "30"]],
    }
    backend = {"step_time": 0.01, "num_blocks": 256}
    with live_server(
        folder / "log", backend=backend, core=CORE, what_if=True, config=config
    ) as server:
        yield server


@pytest.fixture
def whole(one_server: LiveServer) -> LiveServer:
    """That server, which has served within the minute that a timeline begins with."""
    generate(one_server, 40, slo={"class": "interactive", "ttft_ms": 1})
    return one_server


def shown(page: Any, tab: str) -> None:
    """Go there, until it has what it shows."""
    page.get_by_role("link", name=tab, exact=True).click()
    said = {
        "Playground": "Nothing was said yet",
        "Timeline": "blocks free",
        "Promises": "Steps and what they cost",
        "What if": "Nothing was simulated yet",
        "Server": "4096 tokens",
        "Operations": "--drain-timeout",
    }[tab]
    page.locator("main > div:not([hidden])").get_by_text(said).first.wait_for()


# what of the page is neither in sight nor in something that scrolls by itself
_BEYOND = """(width) => [...document.querySelectorAll("main :is(button, input, select), nav a, h2")]
  .filter((each) => each.checkVisibility() && !each.closest(".scroll, .hidden, dialog"))
  .filter((each) => { const { left, right } = each.getBoundingClientRect();
    return left < 0 || right > width; })
  .map((each) => each.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize(("width", "ratio"), [(640, 2), (360, 1)], ids=["zoomed", "phone"])
def test_nothing_is_lost_in_a_narrow_page(
    whole: LiveServer, open_page: OpenPage, width: int, ratio: int
) -> None:
    """1280 by 900 at a zoom of 200 % has so many pixels of the page's own, each of four dots."""
    size = {"width": width, "height": 450}
    page = open_page(f"{whole.url}/ui/", viewport=size, device_scale_factor=ratio)
    for tab in TABS:
        shown(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        assert page.evaluate(_BEYOND, width) == [], tab


# words of facts' names that stand on two lines
_NAMES = "main > div:not([hidden]) .card tbody th[scope=row]"
_BROKEN = """(names) => { const broken = [], range = document.createRange();
  for (const name of document.querySelectorAll(names)) {
    const walker = document.createTreeWalker(name, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    } }
  return broken; }"""


@pytest.mark.parametrize("width", [1440, 1024, 360])
def test_names_of_facts_keep_their_words_whole(
    whole: LiveServer, open_page: OpenPage, width: int
) -> None:
    page = open_page(f"{whole.url}/ui/", viewport={"width": width, "height": 900})
    for tab in ("Server", "Operations"):
        shown(page, tab)
        expect(page.locator(_NAMES).nth(3)).to_be_visible()
        assert page.evaluate(_BROKEN, _NAMES) == [], tab
    # and the test would see one
    narrow = "display: block; min-width: 0; width: 28px; overflow-wrap: anywhere"
    page.locator(_NAMES).first.evaluate("(name, style) => { name.style.cssText = style; }", narrow)
    assert page.evaluate(_BROKEN, _NAMES) != []


# what moved without a reader's doing, as the browser counts it; web.dev calls up to 0.1 good
_SHIFTS = """globalThis.shifts = 0; new PerformanceObserver((list) => {
  for (const each of list.getEntries()) if (!each.hadRecentInput) shifts += each.value;
}).observe({ type: "layout-shift", buffered: true })"""


def test_little_moves_while_pages_open_and_an_answer_grows(
    whole: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(f"{whole.url}/ui/", viewport={"width": 1280, "height": 800})
    for tab in TABS:
        page.goto(f"{whole.url}/ui/")
        page.evaluate(_SHIFTS)
        shown(page, tab)
        # some have more to show once they were asked a second time
        page.wait_for_timeout(700)
        assert page.evaluate("shifts") <= 0.1, tab
    page.goto(f"{whole.url}/ui/")
    page.evaluate(_SHIFTS)
    say(page, "hello", Max_tokens="60")
    page.locator(".story").wait_for()
    assert page.evaluate("shifts") <= 0.1
    # and the test would see it
    page.evaluate("document.querySelector('main').style.paddingTop = '300px'")
    eventually(lambda: page.evaluate("shifts") > 0.1)


def test_every_page_by_keyboard(whole: LiveServer, open_page: OpenPage) -> None:
    """From the first key on: to a page, and to what is done there."""
    page = open_page(f"{whole.url}/ui/")
    page.get_by_text("ready").wait_for()
    focused = "document.activeElement.textContent || document.activeElement.name || ''"

    def tab_to(name: str, most: int = 60) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == name:
                # and it can be seen that it is there
                outline = "getComputedStyle(document.activeElement).outlineStyle"
                assert page.evaluate(outline) != "none", name
                return
        raise AssertionError(f"{name} is not reached")

    tab_to("Promises")
    page.keyboard.press("Enter")
    pressed = page.get_by_role("button", name="Since start")
    pressed.wait_for()
    tab_to("Since start")
    page.keyboard.press("Enter")
    expect(pressed).to_have_attribute("aria-pressed", "true")
    page.evaluate("document.activeElement.blur()")
    name = batch(whole)
    page.reload()
    tab_to("Operations")
    page.keyboard.press("Enter")
    row = page.locator("main > div:not([hidden])").get_by_role("row", name=name)
    row.wait_for()
    tab_to("Cancel")
    page.keyboard.press("Space")
    row.get_by_text("cancelled").wait_for()
    page.get_by_role("link", name="Timeline").focus()
    page.keyboard.press("Enter")
    page.locator(".step-words").get_by_text("blocks free").wait_for()
    tab_to("By time")
    page.keyboard.press("Enter")
    by_time = page.get_by_role("button", name="By time")
    expect(by_time).to_have_attribute("aria-pressed", "true")
    # a request that ended, which can be found
    eventually(lambda: page.evaluate("pacelineTimeline.stories.size") > 0)
    page.keyboard.press("/")
    page.keyboard.type("cmpl")
    page.keyboard.press("Enter")
    page.locator(".story-panel .story").wait_for()
    page.keyboard.press("t")
    page.locator(".tables tbody tr").first.wait_for()


# ------------------------------------------------------------------ axe in each state


def help_is_open(page: Any, server: LiveServer) -> None:
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()


def too_many(page: Any, server: LiveServer) -> None:
    body = '{"error": {"message": "one request a second", "param": null, "code": 429}}'
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, headers={"Retry-After": "20"}, body=body),
    )
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    page.get_by_text(re.compile(r"Try again in \d+ s\.")).wait_for()


def writing(page: Any, server: LiveServer) -> None:
    page.get_by_label("Max tokens", exact=True).fill("2000")
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    page.get_by_role("button", name="Stop").wait_for()


def marked(page: Any, server: LiveServer) -> None:
    """An answer with all that Markdown has."""
    said = (
        "# A\n\n> b `c`\n\n1. d\n   - *e*\n\n| f | g |\n|---|---|\n| 1 | 2 |\n\n"
        "```py\nh()\n```\n[i](https://i.example/)"
    )
    event = json.dumps({"choices": [{"delta": {"content": said}}]})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.evaluate("navigator.clipboard.writeText = async () => { throw new Error('no'); }; 0")
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    page.get_by_role("button", name="As Python").click()
    page.get_by_role("textbox", name="As Python").wait_for()


def no_answer(page: Any, server: LiveServer) -> None:
    page.route("**/*", lambda route: route.fulfill(status=503, body="gone"))
    page.get_by_role("status").get_by_text("not ready").wait_for()
    for tab in ("Server", "Promises", "Operations", "What if"):
        page.get_by_role("link", name=tab, exact=True).click()


def troubles(page: Any, server: LiveServer) -> None:
    """A gap, a lost engine, less detail, a shutdown: all that a timeline says of itself."""
    shown(page, "Timeline")
    for frame, told in (
        ("gap", {"from": 5, "to": 47, "why": "slow viewer"}),
        ("notice", {"kind": "engine_failed", "now": 1e9}),
        ("notice", {"kind": "level", "level": 2}),
        ("notice", {"kind": "draining"}),
    ):
        page.evaluate("(frame) => pacelineTimeline.take(frame)", {"frame": frame, "told": told})
    page.locator(".notice.bad").get_by_text("The engine failed").wait_for()
    page.get_by_text("The server is shutting down").wait_for()
    page.get_by_role("button", name="Table of steps").click()


def looks(page: Any, server: LiveServer) -> None:
    shown(page, "Timeline")
    page.get_by_label("Colour").select_option("slack")
    page.get_by_label("Lanes").select_option("class")
    page.get_by_placeholder("Class, tenant, id").fill("missed")
    page.get_by_text("a second and more is left").wait_for()


def simulating(page: Any, server: LiveServer) -> None:
    shown(page, "What if")
    state = {
        "status": "running", "number": 1, "doing": "simulating", "runs": 2, "requests": 9,
        "done": 0.4, "results": [],
    }  # fmt: skip
    told = httpx.get(f"{server.url}/ui/api/what-if").json() | {"job": state, "busy": False}
    page.route("**/ui/api/what-if", lambda route: route.fulfill(body=json.dumps(told)))
    page.get_by_text("Simulating 9 requests").wait_for()


def failed(page: Any, server: LiveServer) -> None:
    shown(page, "What if")
    page.get_by_role("radio", name="A trace").check()
    page.get_by_label("File:").set_input_files(
        {"name": "bad.csv", "mimeType": "text/csv", "buffer": b"a,b\n1,2\n"}
    )
    page.get_by_role("button", name=re.compile("^Simulate")).click()
    # what is wrong with a trace stands beside the file, before anything is simulated
    page.locator("#bad-trace").get_by_text("not a known trace").wait_for()


def batches(page: Any, server: LiveServer) -> None:
    name = batch(server)
    for tab in ("Operations", "Server"):
        shown(page, tab)
        page.locator("main > div:not([hidden])").get_by_role("row", name=name).wait_for()
        assert violations(page) == []
    httpx.post(f"{server.url}/v1/batches/{name}/cancel", json={})


def conversations(page: Any, server: LiveServer) -> None:
    page.get_by_label("Max tokens").fill("4")
    page.get_by_label("Message").fill("keep this")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("finished: length").wait_for()
    page.get_by_text("Conversations (1)").click()
    page.get_by_role("button", name="Export all").wait_for()


STATES: dict[str, Callable[[Any, LiveServer], None]] = {
    each.__name__: each
    for each in (
        help_is_open, too_many, writing, marked, no_answer, troubles, looks, simulating, failed,
        batches, conversations,
    )
}  # fmt: skip


@THEMES
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing(whole: LiveServer, open_page: OpenPage, state: str, theme: str) -> None:
    page = open_page(f"{whole.url}/ui/", color_scheme=theme)
    page.get_by_text("ready").wait_for()
    STATES[state](page, whole)
    assert violations(page) == []
    page.close()


@THEMES
def test_axe_finds_nothing_where_a_key_is_not_enough(
    tmp_path: Path, open_page: OpenPage, theme: str
) -> None:
    with live_server(tmp_path / "log", core=CORE, keys=KEYS, what_if=True) as server:
        page = open_page(f"{server.url}/ui/timeline", color_scheme=theme)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        assert violations(page) == []
        for key in (USER, ADMIN):
            if not dialog.is_visible():
                page.get_by_role("button", name="API key: set").click()
            dialog.get_by_label("Key").fill(key)
            dialog.get_by_role("button", name="Use this key").click()
            for tab, name in (
                ("Timeline", "timeline"), ("Promises", "promises"), ("What if", "what-if"),
                ("Operations", "operations"),
            ):  # fmt: skip
                page.get_by_role("link", name=tab, exact=True).click()
                here = page.locator("main > div:not([hidden])")
                refused = here.get_by_text("requires a key of scope admin")
                if key == USER:
                    refused.wait_for()
                else:
                    here.get_by_role("heading").first.wait_for(state="attached")
                    expect(refused).to_have_count(0)
                assert violations(page) == [], (tab, name)
        # an empty timeline, and promises of which nothing is known
        page.get_by_role("link", name="Timeline").click()
        page.get_by_text("No step in the last 60 s").wait_for()
        assert violations(page) == []
        page.close()
        generating = httpx.get(f"{server.url}/v1/models", headers=bearer(USER))
        assert generating.status_code == 200


def test_two_pages_of_what_if_do_not_see_each_other(whole: LiveServer, open_page: OpenPage) -> None:
    one, other = (open_page(f"{whole.url}/ui/what-if") for _ in range(2))
    for page in (one, other):
        page.get_by_role("button", name=re.compile("^Simulate")).wait_for()
    # a page behind another one draws seldom, and waiting for what it shows takes long
    one.bring_to_front()
    one.get_by_role("button", name=re.compile("^Simulate")).click()
    one.get_by_text(re.compile("^Done in")).wait_for(timeout=60_000)
    told = "pacelineWhatIf.told.value.job.status"
    # as soon as it is shown again, it asks again
    other.bring_to_front()
    other.get_by_role("link", name="Server").click()
    with other.expect_response("**/ui/api/what-if"):
        other.get_by_role("link", name="What if").click()
    drawn(other)
    assert other.evaluate(told) == "idle"
    assert other.get_by_role("region", name="Results").count() == 0
    # what a reload shows is one's own
    one.bring_to_front()
    one.reload()
    one.get_by_text(re.compile("^Done in")).wait_for()
    other.bring_to_front()
    other.reload()
    other.get_by_text("Nothing was simulated yet").wait_for()


def test_a_chart_is_dragged_through_time(whole: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{whole.url}/ui/timeline?zoom=32")
    page.locator(".step-words").get_by_text("blocks free").wait_for()
    stream = threading.Thread(target=generate, args=(whole, 60))
    stream.start()
    stream.join()
    eventually(lambda: page.evaluate("pacelineTimeline.history.count > 50"))

    def stands_still() -> bool:
        before = page.evaluate("pacelineTimeline.view.end")
        drawn(page)
        return bool(before == page.evaluate("pacelineTimeline.view.end"))

    eventually(stands_still)
    end = page.evaluate("pacelineTimeline.view.end")
    box = page.locator(".chart canvas").bounding_box()
    x, y = box["x"] + 200, box["y"] + 60
    page.mouse.move(x, y)
    page.mouse.down()
    for part in range(1, 6):
        page.mouse.move(x + 40 * part, y)
    page.mouse.up()
    # 200 pixels to the right are some six steps of 32 back
    eventually(lambda: 5 < end - page.evaluate("pacelineTimeline.view.end") < 8)
    page.get_by_role("button", name="Live").wait_for()
