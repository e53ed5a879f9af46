"""docs/understand/constants.md has every number of core and of speculation that tunes behaviour,
with its value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.core

CORE = Path(paceline.core.__file__).parent
# and the folder that the page names its files from
ROOMS = {CORE: CORE, CORE.parent / "speculation": CORE.parent}
PAGE = CORE.parent.parent / "docs/understand/constants.md"

Value = float | tuple[float, ...]


def number(node: ast.expr | None) -> Value | None:
    """The number or tuple of numbers that an expression of literals stands for; None: no such."""
    if node is None or any(
        isinstance(n, ast.Name | ast.Attribute | ast.Call) for n in ast.walk(node)
    ):
        return None
    value = eval(compile(ast.Expression(node), "constant", "eval"))
    parts = value if isinstance(value, tuple) else (value,)
    numbers = bool(parts) and all(type(part) in (int, float) for part in parts)
    return value if numbers else None


def defaults(function: ast.FunctionDef) -> Iterator[tuple[str, Value]]:
    """Parameters that have a number by default; 0 stands for nothing, not for a choice."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    own = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(own, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        value = number(default)
        if value is not None and value != 0:
            yield argument.arg, value


def constants(source: str) -> dict[str, Value]:
    """Module-level numbers by name, and numeric defaults as ``Class(parameter)``,
    ``Class.method(parameter)`` or ``function(parameter)``. Fields of configs are not among them."""
    found: dict[str, Value] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = number(node.value)
            if value is not None:
                found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in functions:
            if not isinstance(function, ast.FunctionDef):
                continue
            name = function.name
            if isinstance(node, ast.ClassDef):
                name = node.name if name == "__init__" else f"{node.name}.{name}"
            found |= {f"{name}({parameter})": value for parameter, value in defaults(function)}
    return found


def documented(page: str) -> dict[tuple[str, str], Value]:
    """Values by (file, name); every row says what it does, how it was chosen and what follows."""
    found: dict[tuple[str, str], Value] = {}
    for line in page.splitlines():
        row = re.fullmatch(r"\| `([\w/]+\.py)` \| `([^`]+)` \| ([^|]+) \| (.+) \|", line)
        if row is None:
            continue
        file, name, value, rest = row.groups()
        cells = [cell.strip() for cell in rest.split(" | ")]
        assert len(cells) == 3 and all(cells), f"{file} {name}: three more columns, not {cells}"
        assert (file, name) not in found, f"{file} {name} is there twice"
        read = number(ast.parse(value.strip(), mode="eval").body)
        assert read is not None, f"{file} {name}: {value} is no number"
        found[file, name] = read
    return found


def test_every_constant_is_in_the_table_with_its_value() -> None:
    there = {
        (path.relative_to(folder).as_posix(), name): value
        for room, folder in ROOMS.items()
        for path in sorted(room.rglob("*.py"))
        for name, value in constants(path.read_text()).items()
    }
    page = documented(PAGE.read_text())
    assert there.keys() - page.keys() == set(), "missing in docs/understand/constants.md"
    assert page.keys() - there.keys() == set(), (
        "in docs/understand/constants.md, but not in the code"
    )
    wrong = {key: (page[key], value) for key, value in there.items() if page[key] != value}
    assert wrong == {}, "(docs/understand/constants.md, the code)"


def test_what_was_measured_is_where_the_table_says() -> None:
    """Entries of the lab log that the table names exist."""
    log = "\n".join(path.read_text() for path in (CORE.parent.parent / "docs/lab-log").glob("*.md"))
    headings = re.findall(r"^## (.*)$", log, re.M)
    named = set(re.findall(r'(?:lab log, |, )"([^"]+)"', PAGE.read_text()))
    assert len(named) > 5
    for name in named:
        assert any(heading.startswith(name) for heading in headings), name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_A: Final = 3", {"_A": 3}),
        ("_A = -0.5", {"_A": -0.5}),
        ("_A: Final = (1, 2.0)\nB = 2**4", {"_A": (1, 2.0), "B": 16}),
        ("_A = True\n_B = 'x'\n_C = len(x)\n_D = ()", {}),
        ("class A:\n    def __init__(self, *, b=2, c=None, d=0): ...", {"A(b)": 2}),
        ("class A:\n    def m(self, b, c=1.5): ...", {"A.m(c)": 1.5}),
        ("def f(a, b=7): ...", {"f(b)": 7}),
    ],
)
def test_the_check_sees(source: str, found: dict[str, Value]) -> None:
    assert constants(source) == found
