"""The page's modules without a browser, by node's own test module, where node is."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

UI = Path(__file__).parents[2] / "ui"


def test_modules() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("this machine has no node")
    tests = sorted((UI / "test").glob("*.test.js"))
    assert tests
    # its runner starts a process for each file
    program = "".join(f"import {json.dumps(path.as_uri())};" for path in tests)
    command = [node, "--input-type=module", "--eval", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
