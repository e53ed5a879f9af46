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
from paceline.sim.report.plots import plot_cdfs, plot_curves
from paceline.sim.report.steps import StepWatcher
from paceline.sim.report.table import side_by_side, text_table
from paceline.sim.report.timeline import StepEvent, TimelineWriter

__all__ = [
    "ClassSummary",
    "Distribution",
    "Metrics",
    "StepEvent",
    "StepWatcher",
    "Summary",
    "TenantSummary",
    "TimelineWriter",
    "cost_per_million",
    "plot_cdfs",
    "plot_curves",
    "side_by_side",
    "text_table",
]
