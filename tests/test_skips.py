"""A skip that nobody expects fails where CI is set."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import EXPECTED, unexpected

ROOT = Path(__file__).parents[1]
# one of each way to skip, and what must not be taken for one
FILE = """
import pytest

def test_inside():
    pytest.skip("no {what} here")

@pytest.mark.skipif(True, reason="no {what} here")
def test_by_a_mark():
    assert False

@pytest.fixture
def lacks():
    pytest.skip("no {what} here")

def test_by_a_fixture(lacks):
    pass

def test_by_an_import():
    pytest.importorskip("{module}")

@pytest.mark.xfail(reason="no reason to skip", strict=True)
def test_that_is_expected_to_fail():
    assert False
"""
MODULE = 'import pytest\npytest.skip("no {what} here", allow_module_level=True)\n'
CONFTEST = """
from tests.skips import Skips

def pytest_configure(config):
    config.pluginmanager.register(Skips())
"""


def run(
    folder: Path, file: str, *, what: str, ci: str, module: str = "", workers: int = 0
) -> tuple[str, str]:
    """(Counts of outcomes, all that was printed) of a run over one file."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_skipping.py").write_text(file.format(what=what, module=module))
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-c", os.devnull]
    options += [f"--rootdir={folder}", *(["-n", str(workers)] if workers else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return re.sub(r" in .*|=+ ?", "", done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_in_ci_a_skip_that_is_not_listed_fails(tmp_path: Path, workers: int) -> None:
    counts, told = run(tmp_path, FILE, what="luck", module="no_such", ci="true", workers=workers)
    assert counts == "2 failed, 1 xfailed, 2 errors", "before a test begins it is an error"
    assert "not expected where CI is set: 'no luck here'" in told
    assert "not expected where CI is set: \"could not import 'no_such'" in told


def test_so_does_one_of_a_whole_file(tmp_path: Path) -> None:
    counts, told = run(tmp_path, MODULE, what="luck", ci="true")
    assert counts == "1 error" and "not expected where CI is set: 'no luck here'" in told
    assert run(tmp_path, MODULE, what="systemd", ci="true")[0] == "1 skipped"


def test_in_ci_a_listed_one_is_a_skip(tmp_path: Path) -> None:
    counts, _ = run(tmp_path, FILE, what="systemd", module="matplotlib.no_such", ci="true")
    assert counts == "1 failed, 3 skipped, 1 xfailed"


def test_elsewhere_any_reason_will_do(tmp_path: Path) -> None:
    counts, _ = run(tmp_path, FILE, what="luck", module="no_such", ci="")
    assert counts == "4 skipped, 1 xfailed"


@pytest.mark.parametrize(
    ("reason", "known"),
    [
        ("needs a CUDA device", True),
        # all of it has to match
        ("needs a CUDA device, and luck", False),
        ("the native library was not built; install a C++ compiler and CMake, then", True),
        ("_lib.so has interface 8, this version needs 9; build it again", True),
        ("qwen3_moe has experts, which the native kernels do not have", False),
        ("Linux 6.1.0 has no slices to ask for", True),
        ("could not import 'matplotlib': No module named 'matplotlib'", True),
        ("could not import 'numpy': No module named 'numpy'", False),
        ("the core of 65237feab123 cannot be had: fatal: not a valid object name", True),
        ("", False),
    ],
)
def test_whole_reasons_are_matched(reason: str, known: bool) -> None:
    assert unexpected(reason) != known


def reasons_in(source: str) -> set[str]:
    """Those that stand in a file of tests, and are not made of parts."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = [word.value for word in node.keywords if word.arg == "reason"]
        if node.func.attr == "skip":
            given += node.args[:1]
        if node.func.attr in ("skip", "skipif"):
            found |= {value.value for value in given if isinstance(value, ast.Constant)}
    return found


def test_every_reason_that_stands_in_the_tests_is_expected() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    reasons = set().union(*(reasons_in(path.read_text()) for path in files))
    assert len(reasons) > 15
    assert not {reason for reason in reasons if unexpected(reason)}


def test_every_line_says_what_is_lacking() -> None:
    assert all(pattern and lacks for pattern, lacks in EXPECTED)
