"""The page's modules without a browser, by node's own test runner, where node is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ui.conftest import REQUIRED, lacking

UI = Path(__file__).parents[2] / "ui"


def test_modules() -> None:
    node = shutil.which("node")
    if node is None:
        lacking("node")
    tests = [str(path) for path in sorted((UI / "test").glob("*.test.js"))]
    assert tests
    run = subprocess.run([node or "", "--test", *tests], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_in_ci_a_missing_browser_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no chromium, and it is required"):
        lacking("chromium", in_ci=True)
    monkeypatch.delenv("CI")
    expected = pytest.fail.Exception if REQUIRED else pytest.skip.Exception
    with pytest.raises(expected, match="no chromium"):
        lacking("chromium", in_ci=True)
