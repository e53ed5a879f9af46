"""Make the pictures of docs/images anew: ``make pictures``, or this module with names of them.

The default model answers, greedily, in a Chromium of fixed size, so that a picture shows what a
reader sees at home. A further picture is a function here and a line of ``PICTURES``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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
    for question in ("Hello!", "What is the capital of France?"):
        answers = page.locator(".story").count()
        page.get_by_label("Message").fill(question)
        page.get_by_label("Message").press("Enter")
        page.locator(".story").nth(answers).wait_for()
    page.locator(".story").last.scroll_into_view_if_needed()
    page.mouse.move(0, 0)


PICTURES: Final[dict[str, Callable[[Any, str], None]]] = {"playground": playground}


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
