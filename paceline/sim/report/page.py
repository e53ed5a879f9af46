"""Reports as one HTML page: no script, no external files, light and dark, readable on paper.

Every text is escaped: names come from servers, files and command lines. The page is well-formed
XML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from paceline.sim.report.metrics import Metrics
from paceline.sim.report.svg import COLOURS, Chart, Series, draw

__all__ = ["NAMES", "SHOWN", "Section", "html_page", "latency_charts", "latency_curves"]

NAMES: Final = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End to end",
}
# most points of a curve; a chart is 400 pixels wide
_MAX_POINTS: Final = 400
# per cent of a run's requests that a distribution shows: the last few would squeeze the others on
# an axis that begins at zero
SHOWN: Final = 99.5
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def _style() -> str:
    light, dark = (
        "".join(f".c{i}{{stroke:{pair[side]}}}" for i, pair in enumerate(COLOURS))
        for side in (0, 1)
    )
    return (
        ":root{color-scheme:light dark;--text:#1a1c1e;--back:#fff;--soft:#5c6166;--rule:#d8dce0}"
        "@media(prefers-color-scheme:dark){:root{--text:#e6e8ea;--back:#101418;--soft:#a3a9af;"
        f"--rule:#333a41}}}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
        "body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--back);"
        "max-width:1000px;margin:0 auto;padding:16px}"
        "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "td,th{padding:2px 12px 2px 0;border-bottom:1px solid var(--rule);text-align:right}"
        "td:first-child,th:first-child{text-align:left;font-weight:normal}"
        ".warning{border-left:4px solid #c75000;padding-left:12px}"
        ".charts{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(300px,1fr))}"
        "figure{margin:0}figcaption{color:var(--soft);font-size:.85em}svg{width:100%}"
        ".title{font-size:14px;font-weight:600;fill:var(--text)}"
        ".tick{font-size:11px;fill:var(--soft)}.middle{text-anchor:middle}.end{text-anchor:end}"
        ".grid{stroke:var(--rule);stroke-width:.7}.line{fill:none;stroke-width:2}"
        ".dots{fill:none;stroke-width:4;stroke-linecap:round}"
        ".target{fill:none;stroke:var(--text);stroke-dasharray:5 4}"
    )


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    title: str
    charts: Sequence[Chart] = ()
    # tables; the first row of each is its head
    tables: Sequence[Sequence[Sequence[str]]] = ()
    text: str = ""


def html_page(title: str, sections: Sequence[Section], *, warnings: Sequence[str] = ()) -> str:
    """Return a whole page."""
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f'<p class="warning">{escape(text)}</p>' for text in warnings]
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2>")
        if section.text:
            body.append(f"<p>{escape(section.text)}</p>")
        body += [_table(rows) for rows in section.tables]
        if section.charts:
            body.append(f'<div class="charts">{"".join(map(_figure, section.charts))}</div>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f"<body>{chr(10).join(body)}</body></html>\n"
    )


def _figure(chart: Chart) -> str:
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f"<figure>{draw(chart)}{note}</figure>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in others
    ]
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def latency_curves(
    runs: Mapping[str, Metrics], metric: str, most_points: int
) -> tuple[dict[str, tuple[list[float], list[float]]], list[float], float]:
    """Return milliseconds and the share of requests below each, from the origin, by run; the
    targets that at least one request has; and where the axis of time ends."""
    most, curves = 0.0, {}
    for run, metrics in runs.items():
        values = np.sort(metrics.values(metric)) * 1e3
        if not len(values):
            continue
        most = max(most, float(np.percentile(values, SHOWN)))
        at = np.unique(np.linspace(0, len(values) - 1, most_points).astype(int))
        curves[run] = [0.0, *values[at].tolist()], [0.0, *((at + 1) / len(values)).tolist()]
    targets = sorted({t * 1e3 for metrics in runs.values() for t in metrics.targets(metric)})
    return curves, targets, 1.05 * max([most, *targets]) or 1.0


def latency_charts(runs: Mapping[str, Metrics]) -> list[Chart]:
    """Return charts of the share of requests below each TTFT, TPOT and E2E, one curve per run, with
    the targets that at least one request has."""
    charts = []
    for metric, name in NAMES.items():
        curves, targets, x_max = latency_curves(runs, metric, _MAX_POINTS)
        beyond = sum(int((metrics.values(metric) * 1e3 > x_max).sum()) for metrics in runs.values())
        note = f"{beyond} requests lie beyond the right edge." if beyond else ""
        series = [
            Series(run, list(zip(*points, strict=True)), "step") for run, points in curves.items()
        ]
        if series:
            axis = f"{metric.upper()}, ms"
            charts.append(
                Chart(name, axis, "share of requests", series, targets, x_max, 1.02, note=note)
            )
    return charts
