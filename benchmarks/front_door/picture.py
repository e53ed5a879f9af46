"""README's moving picture, made of a recorded run: ``python -m benchmarks.front_door.picture``.

Three requests of class ``batch`` are asked of a server of the default model; a question with
targets follows ASKED seconds later, while they are answered. Every piece of text stands in the
picture at the time at which it came, SLOWED times slower, so that it can be read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.common.processes import REPOSITORY
from benchmarks.common.server import PacelineServer
from benchmarks.front_door.loops import MODEL

__all__ = ["PICTURE", "QUESTION", "Lane", "Piece", "drawing", "main"]

PICTURE: Final = REPOSITORY / "docs" / "images" / "answers.svg"
QUESTION: Final = "Name the capital of France."
ASKED: Final = 0.5
SLOWED: Final = 5
_BATCH: Final = (
    "Describe a day at the sea.",
    "Explain how bread is made.",
    "Give three tips for sleeping better.",
)
_TOKENS: Final = 150
# a drawing's line of text, and lines of an answer, the rest is not shown
_COLUMNS: Final = 96
_LINES: Final = 4
# pixels of a character, of a line, and of the edge
_WIDTH: Final = 7.8
_HEIGHT: Final = 17
_EDGE: Final = 16
# pieces of a line that come within so many seconds are drawn at once
_TICK: Final = 0.04
# seconds that the whole stands before it begins again
_STANDS: Final = 3.0


class Piece(NamedTuple):
    """A piece of an answer, and the second at which it came."""

    second: float
    text: str


class Lane(NamedTuple):
    """A request: its label, the second at which it was sent, and its answer."""

    label: str
    sent: float
    pieces: Sequence[Piece]


def _ask(port: int, question: str, slo: dict[str, Any], sent: float, *, began: float) -> Lane:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _TOKENS, "seed": 1, "slo": slo, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    time.sleep(max(0.0, began + sent - time.monotonic()))
    pieces = []
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        pieces.append(Piece(time.monotonic() - began, text))
    return Lane(f"{json.dumps({'slo': slo})}  {question}", sent, pieces)


def _record() -> list[Lane]:
    batch: dict[str, Any] = {"class": "batch"}
    asked = [(question, batch, 0.0) for question in _BATCH]
    asked.append((QUESTION, {"ttft_ms": 500, "tpot_ms": 50}, ASKED))
    with (
        tempfile.TemporaryDirectory() as folder,
        PacelineServer(MODEL, log=Path(folder) / "log") as server,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        # the first request of a server waits for what others do not
        _ask(server.port, "Hello!", {}, 0.0, began=time.monotonic())
        began = time.monotonic()
        return list(pool.map(lambda each: _ask(server.port, *each, began=began), asked))


def drawing(lanes: Sequence[Lane]) -> str:
    """Return an SVG in which each lane's answer is written at its own pace, again and again."""
    last = max(piece.second for lane in lanes for piece in lane.pieces)
    period, y, drawn = last + _STANDS / SLOWED, _EDGE + _HEIGHT, list[str]()
    for lane in lanes:
        drawn.append(_text(lane.label, 0, y, lane.sent / period, period, "l"))
        placed = list(_placed(lane.pieces))
        for (row, _), each in groupby(placed, key=lambda p: (p[0], p[2] // _TICK)):
            together = list(each)
            text = "".join(one for _, _, _, one in together)
            top = y + _HEIGHT * (row + 1)
            drawn.append(_text(text, together[0][1], top, together[0][2] / period, period, "a"))
        y += _HEIGHT * (max(row for row, *_ in placed) + 2) + _HEIGHT // 2
    width = round(_COLUMNS * _WIDTH + 2 * _EDGE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y - _HEIGHT + _EDGE}">\n'
        "<style>text{font:13px monospace;white-space:pre}.l{fill:#8ab4f8}.a{fill:#e8eaed}</style>\n"
        '<rect width="100%" height="100%" rx="8" fill="#202124"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _placed(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, float, str]]:
    """Give the row, the column, the second and the text of each piece that is shown; words are not
    parted."""
    row = column = 0
    for second, text in pieces:
        shown = " ".join(text.split("\n")).replace("  ", " ")
        if column + len(shown) > _COLUMNS:
            row, column, shown = row + 1, 0, shown.lstrip()
        if row == _LINES:
            return
        if shown:
            yield row, column, second, shown
        column += len(shown)


def _text(text: str, column: int, y: float, share: float, period: float, kind: str) -> str:
    x, length = _EDGE + column * _WIDTH, len(text) * _WIDTH
    return (
        f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" textLength="{length:.0f}">{escape(text)}'
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{max(share, 1e-4):.4f}" '
        f'calcMode="discrete" dur="{period * SLOWED:.2f}s" repeatCount="indefinite"/></text>'
    )


def main() -> int:
    """Record a run and draw it."""
    picture = drawing(_record())
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"{PICTURE}: {len(picture.encode()) / 1000:.1f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
