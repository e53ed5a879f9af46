"""The page's modules without a browser, by node's own test runner, where node is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UI = Path(__file__).parents[2] / "ui"


def test_modules() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("this machine has no node")
    tests = [str(path) for path in sorted((UI / "test").glob("*.test.js"))]
    assert tests
    run = subprocess.run([node, "--test", *tests], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
