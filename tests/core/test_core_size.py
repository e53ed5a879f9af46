"""Core keeps to its line budgets, which scripts/core_size.py has and prints."""

from __future__ import annotations

import ast
import importlib.util
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
