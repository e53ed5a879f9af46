"""Timelines that viewers open, plots that exist and repeat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival, Served
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.plots import plot_cdfs, plot_curves
from paceline.timeline.chrome import StepEvent, TimelineWriter


def test_timeline_is_valid_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    events = [
        StepEvent(0, 0.0, 0.25, "1 prompt", {"tokens": 512}),
        StepEvent(1, 0.1, 0.2, "2 decodes"),
        StepEvent(0, 0.25, 1e-6, '3 "decodes"'),
    ]
    with TimelineWriter(path) as writer:
        for event in events:
            writer.add(event)
    assert writer.num_events == 3
    trace = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert [(s["tid"], s["ts"], s["dur"]) for s in slices] == [
        (0, 0.0, 250_000.0),
        (1, 100_000.0, 200_000.0),
        (0, 250_000.0, 1.0),
    ]
    assert slices[0]["args"] == {"tokens": 512} and slices[2]["name"] == '3 "decodes"'
    titles = [event["args"]["name"] for event in trace if event["ph"] == "M"]
    assert titles == ["replica 0", "replica 1"]


def test_a_timeline_without_steps_opens_too(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    with TimelineWriter(path):
        pass
    assert json.loads(path.read_text())["traceEvents"] == []


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        TimelineWriter(tmp_path / "none" / "steps.json")
    with pytest.raises(ConfigError, match=r"plots are written as \.png, \.svg, \.pdf"):
        plot_curves({}, tmp_path / "plot.txt", x="", y="")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"paceline\[plots\]"):
        plot_cdfs({}, tmp_path / "plot.png")


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = Metrics()
    for index in range(50):
        arrival = Arrival(float(index), 10, 10)
        metrics.add(Served(arrival, 0, index, index + 0.5, index + 1 + index / 50, 10, 0, 0))
    for name in ("a.svg", "b.svg", "c.png"):
        plot_cdfs({"fcfs": metrics, "nothing ran": Metrics()}, tmp_path / name)
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text()
    assert "<svg" in first
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    plot_curves({"fcfs": [(1.0, 1.0), (2.0, 1.5)]}, tmp_path / "curve.pdf", x="rate", y="goodput")
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_plots_have_titles_target_lines_and_axes_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    saved = Figure.savefig

    def keep(figure: Figure, *args: object, **kwargs: object) -> None:
        drawn.append(figure)
        saved(figure, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    metrics = Metrics()
    for index in range(50):
        arrival = Arrival(float(index), 10, 10, ttft=0.8, tpot=0.05)
        metrics.add(Served(arrival, 0, index, index + 0.5, index + 1 + index / 50, 10, 0, 0))
    plot_cdfs({"fcfs": metrics}, tmp_path / "cdf.svg", title="50 requests")
    curves = {"fcfs": [(1.0, 1.0), (2.0, 1.5)]}
    plot_curves(curves, tmp_path / "c.svg", x="x", y="y", title="goodput", at_most_x="all")
    cdfs, curve = drawn
    assert cdfs.get_suptitle() == "50 requests"
    assert next(axis.get_title() for axis in cdfs.axes) == "Time to first token"
    for axis in (*cdfs.axes, *curve.axes):
        assert axis.get_xlim()[0] == axis.get_ylim()[0] == 0.0
    # TTFT and TPOT have a target, E2E has none
    lines = [[list(line.get_xdata()) for line in axis.lines] for axis in cdfs.axes]
    assert [800.0, 800.0] in lines[0] and [50.0, 50.0] in lines[1]
    assert len(lines[2]) == 1
    assert curve.axes[0].get_title() == "goodput"
    diagonal = curve.axes[0].lines[1]
    assert [diagonal.get_xdata()[1], diagonal.get_ydata()[1]] == [2.0, 2.0]  # type: ignore[index]
