"""Reports of a run: figures, tables, plots, timelines."""

from __future__ import annotations

from paceline.sim.report.metrics import (
    ClassSummary,
    Distribution,
    Metrics,
    Summary,
    TenantSummary,
    cost_per_million,
)
from paceline.sim.report.page import Section, html_page, latency_charts
from paceline.sim.report.plots import plot_cdfs, plot_curves
from paceline.sim.report.steps import StepWatcher
from paceline.sim.report.svg import Chart, Series, draw
from paceline.sim.report.table import comparison, side_by_side, text_table
from paceline.timeline.chrome import StepEvent, TimelineWriter

__all__ = [
    "Chart",
    "ClassSummary",
    "Distribution",
    "Metrics",
    "Section",
    "Series",
    "StepEvent",
    "StepWatcher",
    "Summary",
    "TenantSummary",
    "TimelineWriter",
    "comparison",
    "cost_per_million",
    "draw",
    "html_page",
    "latency_charts",
    "plot_cdfs",
    "plot_curves",
    "side_by_side",
    "text_table",
]
