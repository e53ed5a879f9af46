"""A run as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.bench.account import Report
from paceline.bench.answers import Outcome
from paceline.sim.report.page import Section, html_page, latency_charts
from paceline.sim.report.svg import Chart, Series

__all__ = ["bench_page"]

# most dots of a cloud, and bins of a curve; a chart is 400 pixels wide
_MAX_DOTS: Final = 2000
_BINS: Final = 100


def bench_page(report: Report, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Render the page of a run.

    Args:
        settings, machine: shown unchanged.
    """
    kinds = [["why", "requests", "the first one's words"]]
    for kind, count in [*report.refused.items(), *report.failed.items()]:
        kinds.append([kind, str(count), report.details.get(kind, "")])
    sections = [Section("Figures", tables=[report.rows(), report.latency_rows()])]
    if len(kinds) > 1:
        sections.append(Section("Refused and failed", tables=[kinds]))
    sections += [
        Section("Latencies", latency_charts({report.summary.name or "run": report.metrics})),
        Section("The run", _over_time(report.outcomes)),
        Section(
            "Settings and machine",
            tables=[_pairs("setting", settings), _pairs("generator's machine", machine)],
        ),
    ]
    title = f"{report.summary.requests} requests to {report.summary.name}"
    return html_page(title, sections, warnings=report.warnings)


def _pairs(name: str, values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, ""], *([key, str(value)] for key, value in values.items())]


def _over_time(outcomes: Sequence[Outcome]) -> list[Chart]:
    if not outcomes:
        return []
    end = max(outcome.ended for outcome in outcomes) or 1.0
    every = -(-len(outcomes) // _MAX_DOTS)
    shown = outcomes[::every]
    answered = [(o.sent, 1e3 * (o.chunks[0] - o.sent)) for o in shown if not o.failure]
    lost = [(o.sent, 0.0) for o in shown if o.failure]
    dots = [Series("answered", answered, "points")]
    if lost:
        dots.append(Series("refused or failed (at 0)", lost, "points"))
    return [
        Chart(
            "Time to first token, by when it was sent",
            "seconds from the start",
            "TTFT, ms",
            dots,
            x_max=end,
            note=f"One request in {every} is shown." if every > 1 else "",
        ),
        Chart(
            "Requests in flight",
            "seconds from the start",
            "requests, mean of each interval",
            [Series("in flight", _in_flight(outcomes, end))],
            x_max=end,
        ),
        Chart(
            "Output",
            "seconds from the start",
            "tokens/s, mean of each interval",
            [Series("output tokens", _tokens(outcomes, end))],
            x_max=end,
        ),
    ]


def _in_flight(outcomes: Sequence[Outcome], end: float) -> list[tuple[float, float]]:
    """Return (middle of an interval, mean requests in flight) of each interval."""
    width = end / _BINS
    found = [0.0] * _BINS
    for outcome in outcomes:
        for index in range(int(outcome.sent / width), _BINS):
            low, high = max(outcome.sent, index * width), min(outcome.ended, (index + 1) * width)
            if high <= low:
                break
            found[index] += (high - low) / width
    return [((index + 0.5) * width, value) for index, value in enumerate(found)]


def _tokens(outcomes: Sequence[Outcome], end: float) -> list[tuple[float, float]]:
    """Return (middle of an interval, output tokens per second), failures included."""
    width = end / _BINS
    found = [0.0] * _BINS
    for outcome in outcomes:
        for at in outcome.chunks:
            # its share, as a chunk may hold several
            share = outcome.tokens / len(outcome.chunks)
            found[min(_BINS - 1, int(at / width))] += share / width
    return [((index + 0.5) * width, value) for index, value in enumerate(found)]
