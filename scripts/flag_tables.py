"""Writes the tables of docs/use/flags.md, from the rows that the command line reads.

    python scripts/flag_tables.py [--write]

Without ``--write`` it says whether the page is as it would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paceline.cli.flags.elsewhere.llama_server import LLAMA_SERVER
from paceline.cli.flags.elsewhere.ollama import RUN, VARIABLES
from paceline.cli.flags.elsewhere.rows import Row
from paceline.cli.flags.elsewhere.vllm import VLLM

PAGE: Final = Path(__file__).parents[1] / "docs" / "use" / "flags.md"
_TABLE: Final = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def _lines(pairs: Iterable[tuple[str, str]], first: str) -> str:
    """Return a table; names with the same meaning share a line."""
    names: dict[str, list[str]] = {}
    for name, meaning in pairs:
        names.setdefault(meaning, []).append(name)
    rows = [f"| {', '.join(each)} | {meaning} |\n" for meaning, each in names.items()]
    return "".join([f"| {first} | here |\n", "|---|---|\n", *rows])


def _of_rows(rows: Iterable[Row]) -> str:
    found = [
        (", ".join(f"`{n}`" for n in row.names if not n.startswith("--no-")), row.meaning)
        for row in rows
    ]
    return _lines(found, "flag")


def page_of(text: str) -> str:
    """Return the page with its four tables renewed."""
    variables = _lines(((f"`{name}`", here) for name, (_, here) in VARIABLES.items()), "variable")
    tables = iter((_of_rows(VLLM), _of_rows(LLAMA_SERVER), variables, _of_rows(RUN)))
    return _TABLE.sub(lambda _: next(tables), text)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = page_of(text)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        print(f"{PAGE.name} is not what `make api-tables` would write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
