"""Common parts of the views of servers and gateways."""

from __future__ import annotations

from rich.padding import PaddingDimensions
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["Lines", "first_rows", "headed_table"]


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
