"""What the chart draws of a fixed recording, beside what it is known to draw (``references/``).

Cells are compared as letters, one each, so that a difference can be read; the rest of the chart,
without its texts, as pixels, whose edges may differ a little from browser to browser.
``python -m tests.ui.references`` writes the references again: look at what changed.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any, Final

from paceline.timeline.codec import encode
from paceline.timeline.events import FrameType, Told, vocabulary
from tests.server.live_process import eventually, live_server
from tests.ui.conftest import ARGS, CHROMIUM

__all__ = [
    "CASES",
    "CONTEXT",
    "FOLDER",
    "PICTURES",
    "chart",
    "differing",
    "letters",
    "recording",
    "replayed",
]

FOLDER: Final = Path(__file__).parent / "references"
_VECTORS: Final = Path(__file__).parent / "vectors" / "timeline.json"
# by name, the query of the page's address
CASES: Final = {
    "state": "zoom=9",
    "class": "zoom=9&colour=class&group=class",
    "tenant": "zoom=9&colour=tenant&group=tenant",
    "slack": "zoom=9&colour=slack&group=slack",
    # several steps in one place
    "far": "zoom=0.25",
}
# those of which all of the chart is compared, beside its cells
PICTURES: Final = ("state", "slack")
CONTEXT: Final[dict[str, Any]] = {
    "viewport": {"width": 1000, "height": 800},
    "device_scale_factor": 1,
    "color_scheme": "light",
    "reduced_motion": "reduce",
}
# colours of the light theme, as letters; others are "?"
_LETTERS: Final = {
    "": ".", "868e96": "w", "c77700": "C", "0072b2": "d", "b3261e": "P", "562929": "S",
    "3f6fa8": "0", "7a4fa3": "1", "2f7d6b": "2", "8a6d3b": "3",
    "8c1d18": "-", "d9480f": "~", "c79a00": "!", "3d8ec9": "+", "1f4e79": "*",
}  # fmt: skip
# of channels of a pixel, from which on it differs
_VISIBLE: Final = 48
_CELLS: Final = """(() => {
  const p = pacelineTimeline.painter(), { width, height, data } = p.image;
  const hex = (i) => data[i + 3] < 255 ? (data[i + 3] ? "faint" : "")
    : [0, 1, 2].map((c) => data[i + c].toString(16).padStart(2, "0")).join("");
  const row = (y) => Array.from({ length: width }, (_, x) => hex(4 * (y * width + x)));
  return Array.from({ length: height }, (_, y) => row(y));
})()"""
_CHART: Final = """(() => {
  const p = pacelineTimeline.painter(), copy = document.createElement("canvas");
  copy.width = p.width - 72;
  copy.height = p.y.axis;
  copy.getContext("2d").drawImage(p.canvas, -72, 0);
  return copy.toDataURL("image/png").split(",")[1];
})()"""


def recording(server: int = 1) -> bytes:
    """What a server answers a page that asks for its timeline."""
    hello = {**vocabulary(), "server": server, "engine": 1, "first": 0, "now": 100.0, "unix": 0.0}
    frames = base64.b64decode(json.loads(_VECTORS.read_text())["told"]["frames"])
    return encode(Told(FrameType.HELLO, hello)) + frames


def replayed(page: Any, address: str, case: str) -> None:
    """Open the timeline with the recording in place of the server's, and stop it at its end."""
    told = []

    def answer(route: Any) -> None:
        # once; whoever asks again waits for an answer
        if not told:
            told.append(True)
            route.fulfill(body=recording(), content_type="application/octet-stream")

    page.route("**/ui/api/timeline*", answer)
    page.goto(f"{address}/ui/timeline?{CASES[case]}")
    # all of it is read: a reader that falls behind takes it in several turns
    page.get_by_text("the stream ended").wait_for()
    page.locator(".step-words").get_by_text("blocks free").wait_for()
    # without movement it is drawn once a second
    here = "(({ view, history }) => view.end === history.count)(pacelineTimeline)"
    eventually(lambda: bool(page.evaluate(here)))
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Live").wait_for()
    # the frame that was asked for as it stopped
    eventually(lambda: page.evaluate("pacelineTimeline.pending()") == 0)


def letters(page: Any) -> str:
    """The cells, a line a row: those that wait, then lanes."""
    rows = ["".join(_LETTERS.get(colour, "?") for colour in row) for row in page.evaluate(_CELLS)]
    return "\n".join(row.rstrip(".") for row in rows) + "\n"


def chart(page: Any) -> bytes:
    """The chart without the names at its left and the times below it, as PNG."""
    return base64.b64decode(page.evaluate(_CHART))


def differing(one: bytes, other: bytes) -> float:
    """Share of pixels that look different; 1.0 where the sizes do."""
    from PIL import Image, ImageChops

    first, second = (Image.open(io.BytesIO(data)).convert("RGB") for data in (one, other))
    if first.size != second.size:
        return 1.0
    channels = ImageChops.difference(first, second).split()
    seen = ImageChops.lighter(ImageChops.lighter(channels[0], channels[1]), channels[2])
    return sum(seen.histogram()[_VISIBLE:]) / (first.width * first.height)


def main() -> int:
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    log = Path("/dev/null")
    with live_server(log) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        for case in CASES:
            page = browser.new_context(**CONTEXT).new_page()
            replayed(page, server.url, case)
            (FOLDER / f"{case}.txt").write_text(letters(page))
            if case in PICTURES:
                (FOLDER / f"{case}.png").write_bytes(chart(page))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
