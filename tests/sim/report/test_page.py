"""Pages and their charts: well formed, from zero, nothing from elsewhere, every text escaped."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from paceline.sim.arrival import Arrival, Served
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.page import Section, html_page, latency_charts
from paceline.sim.report.svg import Chart, Series, draw

EVIL = '<script>alert("x")</script>&'


def parse(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def path(svg: ElementTree.Element, style: str) -> list[list[float]]:
    """Numbers of the paths of a class."""
    found = [each.get("d") or "" for each in svg.iter("path") if each.get("class") == style]
    return [[float(number) for number in re.findall(r"[0-9.]+", text)] for text in found]


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in svg.iter("text")]


def test_a_chart_is_to_scale() -> None:
    points = [(0.0, 0.0), (50.0, 1.0), (100.0, 4.0)]
    chart = Chart(
        "T", "x in ms", "share", [Series("a", points)], targets=(25.0,), x_max=100.0, y_max=4.0
    )
    svg = ElementTree.fromstring(draw(chart))
    assert {"T", "x in ms", "share", "a", "target 25", "0", "100", "4"} <= set(texts(svg))
    line, legend = path(svg, "c0 line")
    left, bottom, middle, quarter, right, top = line
    assert middle == pytest.approx((left + right) / 2)
    assert bottom - quarter == pytest.approx((bottom - top) / 4)
    assert len(legend) == 4
    ((target, *_),) = path(svg, "target")
    assert target == pytest.approx(left + (right - left) / 4)


def test_axes_begin_at_zero_and_hold_everything() -> None:
    svg = ElementTree.fromstring(
        draw(Chart("T", "x", "y", [Series("a", [(90.0, 80.0), (100.0, 85.0)])], targets=(120.0,)))
    )
    left, bottom = 56.0, 226.0
    ((x, y, *_), _) = path(svg, "c0 line")
    # 90 of 120 and a little, 80 of 85 and a little
    assert (x - left) / 392 == pytest.approx(90 / 122.4, abs=0.01)
    assert (bottom - y) / 196 == pytest.approx(80 / 89.25, abs=0.01)


@pytest.mark.parametrize("most", [1e-6, 0.03, 1.0, 1.02, 7.5, 99.9, 100.0, 12345.0, 2e9])
def test_ticks_are_few_and_round(most: float) -> None:
    svg = ElementTree.fromstring(
        draw(Chart("T", "", "", [Series("a", [(0, 0), (1, most)])], y_max=most))
    )
    labels = [float(text) for text in texts(svg)[1:] if re.fullmatch(r"[0-9.e+-]+", text)]
    rows = labels[labels.index(0.0, 1) :]
    assert rows[0] == 0 and 3 <= len(rows) <= 8
    assert rows[-1] <= most * (1 + 1e-9) and rows == sorted(set(rows))


def test_nothing_to_draw() -> None:
    for series in ((), (Series("a", ()),), (Series("a", ((0.0, 0.0),), "points"),)):
        ElementTree.fromstring(draw(Chart("T", "x", "y", series)))


def test_a_page_needs_nothing_and_runs_nothing() -> None:
    chart = Chart(EVIL, EVIL, EVIL, [Series(EVIL, [(0, 0), (1, 1)])], note=EVIL, at_most_x=EVIL)
    section = Section(EVIL, [chart], [[["", EVIL], [EVIL, EVIL]]], EVIL)
    page = html_page(EVIL, [section], warnings=[EVIL])
    tree = parse(page)
    assert "<script" not in page
    assert not re.search(r"(\bsrc=|href|url\(|@import|http:|https:)", page)
    assert "default-src 'none'" in page
    # escaped, not lost: a heading, a title, two cells, ...
    assert "".join(tree.itertext()).count(EVIL) >= 10


def test_latencies_of_runs() -> None:
    metrics = Metrics()
    for index in range(1000):
        at = float(index)
        first = at + 0.001 * (index + 1)
        metrics.add(
            Served(
                Arrival(at, 5, 3, ttft=0.2), 0, at, first, first + 0.5, 3, 0, 0
            )
        )  # fmt: skip
    charts = latency_charts({"a": metrics, "none": Metrics()})
    assert [chart.x for chart in charts] == ["TTFT, ms", "TPOT, ms", "E2E, ms"]
    (series,) = charts[0].series
    assert series.points[0] == (0.0, 0.0)
    assert series.points[-1] == (pytest.approx(1000), 1.0)
    assert charts[0].targets == [200.0]
    # 99.5 % of them, and a little
    assert charts[0].x_max == pytest.approx(995 * 1.05, rel=0.01)
    slow = Metrics()
    for index in range(1000):
        slow.add(Served(Arrival(0.0, 5, 3), 0, 0.0, 9.0 if index < 3 else 0.1, 10.0, 3, 0, 0))
    assert latency_charts({"a": slow})[0].note.startswith("3 requests lie beyond")
