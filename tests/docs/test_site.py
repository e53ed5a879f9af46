"""The site that `make docs` built: nothing of another origin, all that the pages have, searchable.

Part of `make test-docs`, which builds it first.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.docs.pages import DOCS, ROOT, headings, links
from tests.server.live_process import eventually

SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.docs
PAGES = sorted(DOCS.rglob("*.md"))


def built(page: Path) -> Path:
    name = page.relative_to(DOCS).with_suffix(".html")
    # a folder's README is its index
    return SITE / (name.with_name("index.html") if name.stem == "README" else name)


class Elements(HTMLParser):
    """Elements of a page: those of its article counted, and addresses that a browser loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self._inside = 0
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        if tag == "article":
            self._inside += 1
        if self._inside:
            self.counts[tag] = self.counts.get(tag, 0) + 1
        if "id" in told:
            self.ids.add(told["id"])
        # a link that is followed asks nothing before it is
        if tag != "a":
            self.loads += [told[name] for name in ("src", "href", "srcset", "data") if name in told]

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._inside -= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_has_all_that_the_repository_shows(page: Path) -> None:
    site = Elements(built(page))
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    here: dict[str, int] = {}
    for token in tokens:
        if token.type in ("fence", "code_block"):
            here["pre"] = here.get("pre", 0) + 1
        elif token.nesting == 1:
            here[token.tag] = here.get(token.tag, 0) + 1
    for tag in ("table", "pre", "tr", "li", "h1", "h2", "h3"):
        assert site.counts.get(tag, 0) == here.get(tag, 0), tag
    assert set(headings(page)) <= site.ids
    assert not [address for address in site.loads if re.match(r"(https?:)?//", address)]


def test_no_style_loads_from_elsewhere() -> None:
    sheets = [*SITE.rglob("*.css")]
    assert sheets
    for sheet in sheets:
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_pictures_are_there() -> None:
    pictures = {link for page in PAGES for link in links(page) if link.endswith(".png")}
    assert pictures
    for picture in pictures:
        assert list(SITE.rglob(Path(picture).name)), picture


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "page", ["index.html", "understand/scheduling.html", "studies/policies.html"]
)
def test_a_page_asks_no_other_origin(address: str, open_page: Any, page: str) -> None:
    """And says no error: what ``open_page`` watches."""
    opened = open_page(f"{address}/{page}")
    opened.wait_for_load_state("networkidle")
    assert opened.locator("article h1").inner_text()


def test_the_demo_plays(address: str, open_page: Any) -> None:
    page = open_page(f"{address}/use/demo.html")
    frame = page.frame_locator("iframe.demo")
    frame.get_by_text("Forty seconds of a server").wait_for()
    frame.locator(".step-words").get_by_text("blocks free").wait_for()
    (inside,) = [each for each in page.frames if each.url.endswith("/demo/index.html")]
    steps = inside.evaluate("pacelineTimeline.history.count")
    eventually(lambda: inside.evaluate("pacelineTimeline.history.count") > steps > 0)


def test_search_finds_a_heading(address: str, open_page: Any) -> None:
    page = open_page(f"{address}/index.html")
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    # the theme shows the field and gives it the focus
    page.wait_for_function("document.activeElement?.matches('input')")
    page.keyboard.type("pressure valve")
    page.locator("a", has_text="The pressure valve").first.click()
    page.wait_for_url("**/understand/scheduling.html*")
    page.locator("h3", has_text="The pressure valve").wait_for()


def test_links_of_the_navigation_work(address: str, open_page: Any) -> None:
    page = open_page(f"{address}/index.html")
    for name in ("Choose a policy", "Troubleshooting", "Lab log"):
        page.goto(f"{address}/index.html")
        page.locator("nav a", has_text=name).first.evaluate("link => link.click()")
        page.locator("article h1", has_text=name).wait_for()
