"""Plots of runs: latency distributions, goodput against rate. matplotlib is the extra ``plots``.

Drawn without pyplot: no state outside the figure, no display. The path's suffix decides the format:
png, svg or pdf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.files import private_opener
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.page import NAMES, latency_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_cdfs", "plot_curves"]

_FORMATS = (".png", ".svg", ".pdf")
# most steps of a curve; a screen shows no more
_MAX_POINTS = 2000


def plot_cdfs(runs: Mapping[str, Metrics], path: Path, *, title: str = "") -> None:
    """Plot the share of requests below each TTFT, TPOT and E2E; one curve per run, and a dashed
    line at each of these targets that at least one request has. Axes begin at zero; the time axis
    ends at 99.5 % of the slowest run's requests, or at the largest target.

    Raises:
        ConfigError: no matplotlib, an unknown suffix, or the file cannot be written.
    """
    figure = _figure(path, width=12.0)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, metric in zip(axes, ("ttft", "tpot", "e2e"), strict=True):
        curves, targets, x_max = latency_curves(runs, metric, _MAX_POINTS)
        for name, (x, y) in curves.items():
            axis.step(x, y, where="post", label=name)
        for target in targets:
            axis.axvline(target, color="black", linestyle="--", linewidth=1.0)
            axis.annotate(f" target {target:g}", (target, 0.02), fontsize="small")
        axis.set_title(NAMES[metric])
        axis.set_xlabel(f"{metric.upper()} (ms)")
        axis.set_xlim(0.0, x_max)
        axis.set_ylim(0.0, 1.02)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[-1].legend(loc="lower right")
    if title:
        figure.suptitle(title)
    _save(figure, path)


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x: str,
    y: str,
    title: str = "",
    at_most_x: str = "",
) -> None:
    """Plot lines through (x, y) points, for instance goodput against rate. Axes begin at zero.

    Args:
        x, y: labels of the axes, with units.
        at_most_x: label for a dashed line at y = x, the largest value that y can have.
    """
    figure = _figure(path, width=6.0)
    axis = figure.subplots()
    for name, points in curves.items():
        axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name)
    if at_most_x:
        most = max((p[0] for points in curves.values() for p in points), default=0.0)
        axis.plot([0.0, most], [0.0, most], color="black", linestyle="--", label=at_most_x)
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_xlim(left=0.0)
    axis.set_ylim(bottom=0.0)
    axis.grid(alpha=0.3)
    axis.legend()
    _save(figure, path)


def _figure(path: Path, width: float) -> Figure:
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: plots are written as {', '.join(_FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'paceline[plots]'") from None
    return Figure(figsize=(width, 4.0), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    import matplotlib

    # without a date and with fixed ids an unchanged plot gives an unchanged file
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with (
            matplotlib.rc_context({"svg.hashsalt": "paceline"}),
            open(path, "wb", opener=private_opener) as file,
        ):
            figure.savefig(file, dpi=120, metadata=metadata, format=path.suffix[1:])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
