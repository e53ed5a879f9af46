"""Make the pictures of docs/images anew: ``make pictures``, or this module with names of them.

The default model answers, greedily, in a Chromium of fixed size, so that a picture shows what a
reader sees at home. A further picture is a function here and a line of ``PICTURES``.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx

from tests.cli.servers import start_server
from tests.ui.conftest import ARGS, CHROMIUM

__all__ = ["FOLDER", "MAX_BYTES", "PICTURES", "main"]

FOLDER: Final = Path(__file__).parents[2] / "docs" / "images"
# what a reader's connection is asked for, and a clone for ever
MAX_BYTES: Final = 200_000


def playground(page: Any, address: str) -> None:
    """A question, its answer and what became of it."""
    page.goto(f"{address}/ui/")
    page.get_by_text("ready").wait_for()
    fields = {"Temperature": 0, "Max tokens": 64, "First token, ms": 500, "Each token, ms": 50}
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(str(value))
    # as the first token of a start waits for what later ones do not
    for question in ("Hello!", "Name the capital of France."):
        answers = page.locator(".story").count()
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        page.locator(".story").nth(answers).wait_for()
    # the place to write in covers what is above it, but for the end
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.mouse.move(0, 0)


def load(address: str) -> list[threading.Thread]:
    """Requests that come one after another: chats, and long prompts with time; those that run."""
    rng = random.Random(5)

    def one(words: int, tokens: int, slo: dict[str, Any]) -> None:
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(words))
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "slo": slo}
        httpx.post(f"{address}/v1/completions", json=body, timeout=120).raise_for_status()

    chat, batch = {"class": "interactive", "ttft_ms": 400, "tpot_ms": 60}, {"class": "batch"}
    jobs = [(400, 24, batch) if i % 6 == 0 else (20, 16 + i, chat) for i in range(36)]
    threads = [threading.Thread(target=one, args=job) for job in jobs]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    return threads


def timeline(page: Any, address: str) -> None:
    """Those requests as they run, stopped, and the story of one of them."""
    page.goto(f"{address}/ui/timeline?zoom=4")
    page.get_by_role("button", name="Pause").wait_for()
    for thread in load(address):
        thread.join()
    page.get_by_role("button", name="Pause").click()
    # to the last step in which so many ran
    back = (
        "(() => { const { count, lanes } = pacelineTimeline.history;"
        " return count - lanes.lastIndexOf(Math.max(...lanes.subarray(0, count))); })()"
    )
    for _ in range(min(400, int(page.evaluate(back)))):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    # and what was before it too
    for _ in range(3):
        page.keyboard.press("a")
    page.locator(".story-panel .story").wait_for()
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)


def what_if(page: Any, address: str) -> None:
    """Two policies on requests that came just now."""
    for thread in load(address):
        thread.join()
    page.goto(f"{address}/ui/what-if")
    page.get_by_label("Loads, several").fill("1, 2")
    page.get_by_role("button", name="Simulate 4 runs").click()
    page.get_by_text("Done in").wait_for(timeout=120_000)
    page.get_by_role("radio", name="Second timeline: fcfs, 2048 tokens, load 1", exact=True).check()
    page.get_by_role("button", name="First difference").click()
    page.get_by_role("button", name="All").click()
    page.get_by_role("heading", name="Compared").evaluate("(heading) => heading.scrollIntoView()")
    page.mouse.move(0, 0)
    # steps are drawn with the next frame
    page.wait_for_timeout(500)


PICTURES: Final[dict[str, Callable[[Any, str], None]]] = {
    "playground": playground,
    "what-if": what_if,
    "timeline": timeline,
}


def main(names: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    unknown = set(names) - set(PICTURES)
    if unknown or CHROMIUM is None:
        print(
            f"pictures: {unknown or 'chromium is missing (scripts/test-services)'}", file=sys.stderr
        )
        return 2
    FOLDER.mkdir(exist_ok=True)
    with start_server("smollm2-135m") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        for name in names or PICTURES:
            context = browser.new_context(
                viewport={"width": 1200, "height": 760},
                color_scheme="light",
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.set_default_timeout(30_000)
            PICTURES[name](page, server.address)
            path = FOLDER / f"{name}.png"
            page.screenshot(path=path)
            context.close()
            size = path.stat().st_size
            print(f"{path.relative_to(FOLDER.parents[1])} {size} bytes")
            if size > MAX_BYTES:
                print(f"pictures: {name} is above {MAX_BYTES} bytes", file=sys.stderr)
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
