"""Charts as SVG text, for pages without libraries: titles, units, a legend, axes from zero.

Colours are classes that the page's style defines for light and dark. This module does not know
runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

__all__ = ["COLOURS", "Chart", "Series", "draw"]

# light and dark; distinguishable with every common colour blindness (Okabe and Ito)
COLOURS: Final = (
    ("#0072b2", "#56b4e9"),
    ("#c75000", "#e69f00"),
    ("#007a5a", "#00c08b"),
    ("#a8457f", "#e08bc0"),
    ("#6b5b00", "#f0e442"),
    ("#5a5a5a", "#b0b0b0"),
)
_DASHES: Final = ("", "6 3", "2 3")
_WIDTH, _HEIGHT = 460, 300
# left, top, right, bottom of the plot inside the chart
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 30, 448, 226
_LEGEND_TOP, _LEGEND_STEP, _LEGEND_COLUMNS = 276, 16, 2


@dataclass(frozen=True, slots=True)
class Series:
    """Points in order of x, none of them negative."""

    name: str
    points: Sequence[tuple[float, float]]
    # "step" holds a value until the next point
    kind: Literal["line", "step", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """Content of a chart. Axes begin at zero."""

    title: str
    # labels of the axes, with units
    x: str
    y: str
    series: Sequence[Series]
    # values of x with a dashed line and its number: targets
    targets: Sequence[float] = ()
    # ends of the axes; None: at the largest value
    x_max: float | None = None
    y_max: float | None = None
    # label for a dashed line at y = x, the largest value that y can have
    at_most_x: str = ""
    # sentence below the chart, for instance about values left out
    note: str = ""


def draw(chart: Chart) -> str:
    """Return one ``<svg>`` element, which is well-formed XML too."""
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    x_max = chart.x_max or 1.02 * max([*xs, *chart.targets], default=0.0) or 1.0
    most_y = max([*ys, *([min(x_max, max(xs, default=0.0))] if chart.at_most_x else [])], default=0)
    y_max = chart.y_max or 1.05 * most_y or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_RIGHT - _LEFT) * min(1.0, x / x_max),
            _BOTTOM - (_BOTTOM - _TOP) * min(1.0, y / y_max),
        )

    rows = -(-len(chart.series) // _LEGEND_COLUMNS)
    height = _HEIGHT + _LEGEND_STEP * max(0, rows - 1)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(chart.title)}</title>",
        _text(_LEFT, 16, chart.title, "title"),
    ]
    for value in _ticks(x_max):
        x, _ = at(value, 0.0)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>')
        parts.append(_text(x, _BOTTOM + 15, f"{value:g}", "tick middle"))
    for value in _ticks(y_max):
        _, y = at(0.0, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(_text(_LEFT - 5, y + 4, f"{value:g}", "tick end"))
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 33, chart.x, "tick middle"))
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text class="tick middle" transform="translate(12 {middle:.0f}) rotate(-90)">'
        f"{escape(chart.y)}</text>"
    )
    if chart.at_most_x:
        end = min(x_max, y_max)
        (x, y), (right, top) = at(0.0, 0.0), at(end, end)
        parts.append(f'<path class="target" d="M{x:.1f} {y:.1f}L{right:.1f} {top:.1f}"/>')
        x, y = at(0.6 * end, 0.6 * end)
        parts.append(_text(x + 8, y + 14, chart.at_most_x, "tick"))
    for index, series in enumerate(chart.series):
        parts.append(_series(series, index, [at(x, y) for x, y in series.points]))
        column, row = index % _LEGEND_COLUMNS, index // _LEGEND_COLUMNS
        x = _LEFT + column * (_RIGHT - _LEFT) / _LEGEND_COLUMNS
        y = _LEGEND_TOP + _LEGEND_STEP * row
        parts.append(_series(Series("", (), "line"), index, [(x, y), (x + 22, y)]))
        parts.append(_text(x + 28, y + 4, series.name[:28], "tick"))
    for number, target in enumerate(chart.targets):
        x, _ = at(target, 0.0)
        parts.append(f'<path class="target" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>')
        # next to the line, on the side with room; each below the previous one
        side, shift = ("end", -4) if x > (_LEFT + _RIGHT) / 2 else ("", 4)
        label = f"target {target:g}"
        parts.append(_text(x + shift, _BOTTOM - 6 - 13 * number, label, f"tick {side}"))
    return "".join([*parts, "</svg>"])


def _series(series: Series, index: int, places: Sequence[tuple[float, float]]) -> str:
    style = f"c{index % len(COLOURS)}"
    if series.kind == "points":
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        return f'<path class="{style} dots" d="{dots}"/>' if dots else ""
    if not places:
        return ""
    (x, y), *others = places
    path = f"M{x:.1f} {y:.1f}"
    for x, y in others:
        path += f"H{x:.1f}V{y:.1f}" if series.kind == "step" else f"L{x:.1f} {y:.1f}"
    dash = _DASHES[index // len(COLOURS) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="{style} line"{dashed} d="{path}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _ticks(most: float) -> list[float]:
    """Return 0 and round numbers up to ``most``, four to eight of them."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(
        power * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if most / (power * part) <= 6.0
    )
    return [round(step * index, 12) for index in range(int(most / step + 1e-9) + 1)]
