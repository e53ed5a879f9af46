"""The client in JavaScript: its own tests, which play the transcripts in ``vectors/`` too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline

FOLDER = Path(__file__).parents[2] / "clients" / "javascript"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="this machine has no node")
def test_it_behaves_as_this_one() -> None:
    assert NODE is not None
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.strip("v\n").split(".")[0]) < 20:
        pytest.skip("node is older than 20")
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", "test/"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert int(passed) >= 20


def test_it_needs_nothing() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["version"] == paceline.__version__
    assert not {"dependencies", "devDependencies", "peerDependencies"} & set(package)
    for path in (FOLDER / "src").glob("*.js"):
        for name in re.findall(r'from "(.*?)"', path.read_text()):
            assert name.startswith("./"), f"{path.name} imports {name}"
