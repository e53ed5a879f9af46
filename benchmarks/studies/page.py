"""A study's page: text written by hand, and tables between markers, written by the command.

    <!-- begin NAME -->
    | ... |
    <!-- end NAME -->

The text between the markers of a table is replaced by the study's output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["DOCS", "fill", "tables_of", "write_page"]

DOCS = Path(__file__).parents[2] / "docs" / "studies"

_TABLE = re.compile(r"(<!-- begin ([\w-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


def tables_of(text: str) -> dict[str, str]:
    """Return the tables between the markers, by name."""
    return {match[2]: match[3].strip() for match in _TABLE.finditer(text)}


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return ``text`` with its tables replaced.

    Raises:
        ValueError: the page's markers and ``tables`` are not the same names.
    """
    present = tables_of(text).keys()
    if present != tables.keys():
        raise ValueError(f"the page has tables {sorted(present)}, the study {sorted(tables)}")
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[4]}", text)


def write_page(name: str, tables: Mapping[str, str]) -> Path:
    """Update ``docs/studies/NAME.md``; only tables change."""
    path = DOCS / f"{name}.md"
    path.write_text(fill(path.read_text(), tables))
    return path
