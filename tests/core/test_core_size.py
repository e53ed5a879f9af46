"""Core keeps to its line budgets, which scripts/core_size.py has and prints."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("core_size", ROOT / "scripts" / "core_size.py")
assert _SPEC is not None and _SPEC.loader is not None
core_size = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(core_size)
CORE = ROOT / core_size.CORE


@pytest.mark.parametrize("name", core_size.PARTS)
def test_a_part_keeps_to_its_lines(name: str) -> None:
    part = core_size.PARTS[name]
    size = core_size.size_of(core_size.files_of(part, CORE))
    assert size.lines <= part.lines, (
        f"{name} has {size.lines} lines and {size.statements} statements, the limit is "
        f"{part.lines} lines; by folder:\n{core_size.table(CORE)}"
    )


def test_every_path_of_a_part_is_there() -> None:
    for part in core_size.PARTS.values():
        for name in (*part.paths, *part.without):
            assert (CORE / name).exists(), name
        assert len(set(core_size.files_of(part, CORE))) == len(core_size.files_of(part, CORE))


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "one.py").write_text('"""Docstring."""\n\nx = 1\nif x:\n    y = 2\n')
    (tmp_path / "step" / "two.py").write_text("# a comment\n")
    (tmp_path / "three.py").write_text("def f() -> int:\n    return 1\n")
    part = core_size.Part(9, ("step", "three.py"), ("step/two.py",))
    assert core_size.files_of(part, tmp_path) == [tmp_path / "step/one.py", tmp_path / "three.py"]
    assert core_size.size_of(core_size.files_of(part, tmp_path)) == (7, 5)
    assert core_size.num_statements(ast.parse("'''Docstring.'''\nx = 1; y = 2")) == 2


def test_what_a_feature_has(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "one.py").write_text("x = 1\n\ny = 2\n")
    (tmp_path / "shared.py").write_text(
        "import enum\n\n\n@enum.unique\nclass Kind(enum.Enum):\n    A = 1\n\n"
        "    def f(self) -> int:\n        return 2\n\n    def g(self) -> None: ...\n"
    )
    size = core_size.size_of_feature
    assert size(("own",), tmp_path) == (3, 2)
    assert size(("own", "shared.py:Kind.f"), tmp_path) == (5, 4)
    assert size(("shared.py:Kind",), tmp_path) == (8, 5)


def test_the_page_says_how_large_features_are() -> None:
    """Within a tenth or ten lines, and all of it within twenty: nobody writes it for every line."""
    page = (ROOT / "docs" / "understand" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("core_size.py --by-feature")[1].split("\n\n")[1]
    said = {
        name: int(lines.replace(",", ""))
        for name, lines in re.findall(r"^\| ([a-z ]+?) \| ([\d,]+) \|", table, re.MULTILINE)
    }
    sizes = core_size.features(CORE)
    assert list(said) == list(sizes)
    for name, size in sizes.items():
        off = max(10.0, size.lines / 10) if name in core_size.FEATURES else 20.0
        assert abs(size.lines - said[name]) <= off, (
            f"{name}: docs/understand/architecture.md says {said[name]} lines, there are "
            f"{size.lines}"
        )
