"""Size of the page at /ui, and its longest task while an answer streams."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any, Final

from benchmarks.common.processes import REPOSITORY, Unavailable
from benchmarks.common.server import PacelineServer

__all__ = ["measure_page"]

_STATIC: Final = REPOSITORY / "paceline" / "web" / "static"
# 100 tokens a second, for ten seconds
_STEP: Final = 0.01
_TOKENS: Final = 1000
_WATCH: Final = """() => { window.longest = 0;
  new PerformanceObserver((list) => { for (const each of list.getEntries())
    window.longest = Math.max(window.longest, each.duration); }).observe({ type: "longtask" }); }"""


def measure_page(folder: Path) -> dict[str, Any]:
    """Return the sizes and the task. Raises Unavailable without a Chromium."""
    files = [path for path in _STATIC.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")]
    packed = sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in files)
    print(f"{packed / 1e3:.1f} kB in {len(files)} files, each with gzip")
    longest = _longest_task(folder)
    print(
        f"longest task while {1 / _STEP:.0f} tokens a second come: {longest:.0f} ms (0: below 50)"
    )
    return {"page_gzip_kb": round(packed / 1e3, 1), "longest_task_ms": round(longest)}


def _longest_task(folder: Path) -> float:
    program = shutil.which("chromium")
    if program is None:
        raise Unavailable("chromium is missing: scripts/test-services chromium:chromium")
    from playwright.sync_api import sync_playwright

    flags = ("--backend", "null", "--null-step-time", str(_STEP))
    with PacelineServer(*flags, log=folder / "log") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/ui/")
        page.get_by_text("ready").wait_for()
        # a chat would stop, as the null model repeats itself
        page.get_by_role("button", name="Completion").click()
        page.get_by_label("Max tokens").fill(str(_TOKENS))
        page.evaluate(_WATCH)
        page.get_by_label("Text to go on from").fill("hello")
        page.get_by_label("Text to go on from").press("Enter")
        page.get_by_text("finished:").wait_for(timeout=60_000)
        longest: float = page.evaluate("() => window.longest")
        browser.close()
    return longest
