"""Common parts of the views of servers and gateways; "-" is an unknown number."""

from __future__ import annotations

from rich.padding import PaddingDimensions
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.server.observability.snapshot.scrape import Quantiles

__all__ = [
    "Lines",
    "coloured",
    "first_rows",
    "headed_table",
    "pair_of",
    "percent",
    "plain",
    "time_of",
]


class Lines:
    """A panel of labelled lines."""

    def __init__(self) -> None:
        self._grid = Table.grid(padding=(0, 2))
        self._grid.add_column(style="dim", no_wrap=True)
        self._grid.add_column()

    def add(self, label: str, *parts: str, style: str = "") -> None:
        self._grid.add_row(label, Text("   ".join(parts), style))

    def panel(self, title: str) -> Panel:
        return Panel(self._grid, title=title, title_align="left")


def headed_table(padding: PaddingDimensions = (0, 1)) -> Table:
    """Return a table without lines, since its panel has them."""
    return Table(box=None, padding=padding, pad_edge=False, header_style="bold")


def first_rows(table: Table, title: str, most: int, count: int) -> Panel:
    """Return a panel of the table's first ``most`` rows of ``count``, or all."""
    more = f" (the first {most}, {count - most} more)" if count > most else ""
    return Panel(table, title=f"{title}{more}", title_align="left")


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def coloured(value: float | None) -> Text:
    colour = "dim" if value is None else "red" if value < 0.9 else "yellow" if value < 0.99 else ""
    return Text("-" if value is None else f"{value:.1%}", colour)


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def pair_of(times: Quantiles) -> str:
    return (
        "-"
        if times.p50 is None
        else " / ".join(
            ("<" if value is not None and value <= times.floor else "") + time_of(value)
            for value in (times.p50, times.p99)
        )
    )
