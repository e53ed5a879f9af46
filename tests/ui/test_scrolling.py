"""What is in sight while answers grow and pages change, in Chromium, with the null backend."""

from __future__ import annotations

import pytest

from tests.server.live_process import LiveServer, eventually
from tests.ui.conftest import OpenPage, drawn, expect, say

# pixels of the last answer that the field below it covers
_COVERED = """(() => document.querySelector(".turn:last-child").getBoundingClientRect().bottom
  - document.querySelector(".ask").getBoundingClientRect().top)()"""

# where the question that is kept in sight stands, and the header
_ASKED = """[".asked > div", "header"].map((name) =>
  document.querySelector(name).getBoundingClientRect().toJSON())"""


@pytest.mark.parametrize("width", [1200, 390])
def test_the_end_of_an_answer_stays_in_sight(
    server: LiveServer, open_page: OpenPage, width: int
) -> None:
    page = open_page(f"{server.url}/ui/", viewport={"width": width, "height": 500})
    say(page, "hello\n" * 30, Max_tokens="60")
    page.locator(".story").wait_for()
    eventually(lambda: page.evaluate(_COVERED) <= 0)
    below = "(field) => field.getBoundingClientRect().bottom - innerHeight"
    eventually(lambda: page.get_by_label("Message").evaluate(below) <= 0)
    # a reader who goes back to what was said before is left there
    page.evaluate("scrollTo(0, 0)")
    eventually(lambda: page.evaluate("scrollY") == 0)
    drawn(page)
    page.evaluate("document.querySelector('.turn:last-child').append('more ' + 'x\\n'.repeat(99))")
    drawn(page)
    assert page.evaluate("scrollY") == 0
    # until something is said
    say(page, "more")
    page.locator(".story").nth(1).wait_for()
    eventually(lambda: page.evaluate(_COVERED) <= 0 and page.evaluate("scrollY") > 0)


@pytest.mark.parametrize(("width", "header"), [(1200, True), (390, False)])
def test_the_question_stays_in_sight_while_its_answer_grows(
    server: LiveServer, open_page: OpenPage, width: int, header: bool
) -> None:
    """And the header, where the page is wide enough for both."""
    page = open_page(f"{server.url}/ui/", viewport={"width": width, "height": 500})
    page.get_by_role("button", name="Completion").click()
    page.get_by_label("Max tokens").fill("3000")
    field = page.get_by_label("Text to go on from")
    field.fill("What is asked\n" + "x\n" * 40)
    field.press("Enter")
    asked = page.locator(".asked > div")
    asked.get_by_text("What is asked").wait_for()

    def stands() -> bool:
        """Right below the header, or at the edge of the page."""
        box, top = page.evaluate(_ASKED)
        inside = bool(box["left"] >= 0 and box["right"] <= width)
        in_sight = top["top"] == 0 if header else top["bottom"] <= 0
        return inside and in_sight and abs(box["top"] - (top["height"] if header else 0)) <= 1

    # while the answer grows both may move, until the header has no more room
    eventually(stands)
    # a reader who goes back to it sees it once
    page.evaluate("scrollTo(0, 0)")
    asked.wait_for(state="hidden")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    asked.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("stopped by you").wait_for()
    expect(asked).to_have_count(0)


def test_each_page_is_scrolled_by_itself(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/", viewport={"width": 390, "height": 500})
    # long from the first look on
    page.get_by_role("link", name="Operations").click()
    page.get_by_role("cell", name="ready", exact=True).wait_for()
    eventually(lambda: page.title().startswith("Operations"))
    page.get_by_role("link", name="Playground").click()
    # it is scrolled to where it was in the same turn
    eventually(lambda: page.title().startswith("Playground"))
    page.evaluate("scrollTo(0, 300)")
    page.get_by_role("link", name="Operations").evaluate("(link) => link.click()")
    eventually(lambda: page.evaluate("scrollY") == 0)
    page.go_back()
    eventually(lambda: page.evaluate("scrollY") == 300)


# what each frame shows when it is painted: the page, and how far it is scrolled
_PAINTED = """globalThis.painted = []; (function look() {
  painted.push([document.querySelector("nav [aria-current]").textContent, scrollY]);
  requestAnimationFrame(look);
})()"""


def test_a_page_is_never_painted_as_far_scrolled_as_another(
    server: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/ui/operations", viewport={"width": 390, "height": 500})
    page.get_by_role("cell", name="ready", exact=True).wait_for()
    page.evaluate("scrollTo(0, 200)")
    page.get_by_role("link", name="Playground").evaluate("(link) => link.click()")
    eventually(lambda: page.evaluate("scrollY") == 0)
    page.evaluate("scrollTo(0, 100)")
    eventually(lambda: page.evaluate("scrollY") == 100)
    page.evaluate(_PAINTED)
    for _ in range(5):
        for name in ("Operations", "Playground"):
            page.get_by_role("link", name=name).evaluate("(link) => link.click()")
            drawn(page)
    painted = {(name, scrolled) for name, scrolled in page.evaluate("painted")}
    assert painted == {("Operations", 200), ("Playground", 100)}


@pytest.mark.parametrize("width", [360, 640])
def test_a_narrow_page_does_not_scroll_sideways(
    server: LiveServer, open_page: OpenPage, width: int
) -> None:
    """640 is 1280 at a zoom of 200 %."""
    page = open_page(f"{server.url}/ui/", viewport={"width": width, "height": 700})
    say(page, "x" * 300, Max_tokens="40")
    page.locator(".story").wait_for()
    for path, told in (("playground", "Write a message"), ("server", "4096 tokens")):
        page.get_by_role("link", name=path.title()).click()
        page.get_by_placeholder(told).or_(page.get_by_text(told)).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
