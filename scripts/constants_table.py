"""Renew the values in docs/understand/constants.md, from the numbers of core and of speculation.

    python scripts/constants_table.py [--write]

Without ``--write`` it says whether the page is as it would be written. Rows of numbers that are
gone go; a number without a row is named, since its row says what it does and how it was chosen.
These are module-level numbers, and numeric defaults of parameters, as ``Class(parameter)``,
``Class.method(parameter)`` or ``function(parameter)``, but no fields of configurations.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "understand" / "constants.md"
# rooms, and the folders that the page names their files from
ROOMS: Final = {
    ROOT / "paceline" / "core": ROOT / "paceline" / "core",
    ROOT / "paceline" / "speculation": ROOT / "paceline",
}
_ROW: Final = re.compile(r"\| `([\w/]+\.py)` \| `([^`]+)` \| ([^|]+) \| .+ \| .+ \| .+ \|\n")


def number(node: ast.expr | None) -> str | None:
    """Return the text of a number or a tuple of numbers, made of literals; None: it is no such."""
    if node is None or any(
        isinstance(part, ast.Name | ast.Attribute | ast.Call) for part in ast.walk(node)
    ):
        return None
    value = eval(compile(ast.Expression(node), "constant", "eval"))
    parts = value if isinstance(value, tuple) else (value,)
    return repr(value) if parts and all(type(part) in (int, float) for part in parts) else None


def defaults(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield parameters with a number by default; 0 stands for nothing, not for a choice."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        value = number(default)
        if value is not None and float(value.strip("()").split(",")[0]):
            yield argument.arg, value


def constants(source: str) -> dict[str, str]:
    """Return the numbers of a module by name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = number(node.value)
            if value is not None:
                found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(function, ast.FunctionDef):
                continue
            name = function.name
            if isinstance(node, ast.ClassDef):
                name = node.name if name == "__init__" else f"{node.name}.{name}"
            found |= {f"{name}({parameter})": value for parameter, value in defaults(function)}
    return found


def page_of(text: str) -> tuple[str, list[str]]:
    """Return the page with the code's values, and the numbers without a row."""
    there = {
        (path.relative_to(folder).as_posix(), name): value
        for room, folder in ROOMS.items()
        for path in sorted(room.rglob("*.py"))
        for name, value in constants(path.read_text()).items()
    }
    named: set[tuple[str, str]] = set()

    def renewed(row: re.Match[str]) -> str:
        file, name, value = row.groups()
        key = (file, name)
        if key not in there or key in named:
            return ""
        named.add(key)
        if repr(eval(value)) == there[key]:
            return row[0]
        return row[0].replace(f"| {value} |", f"| {there[key]} |", 1)

    made = _ROW.sub(renewed, text)
    return made, [f"{file} {name} = {there[file, name]}" for file, name in there.keys() - named]


def main() -> int:
    text = PAGE.read_text()
    made, missing = page_of(text)
    if missing:
        print(f"{PAGE.relative_to(ROOT)} has no row for", *sorted(missing), sep="\n  ")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
    elif made != text:
        print(f"{PAGE.relative_to(ROOT)} is not what `make api-tables` would write")
        return 1
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
