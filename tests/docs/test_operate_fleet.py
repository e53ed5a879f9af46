"""docs/operate/fleet.md is followed to its end, with the null backend as it says."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.follow import Step, follow
from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "operate/fleet.md"


def printed(steps: list[Step], words: str) -> str:
    (step,) = [step for step in steps if words in step.block.code]
    return step.printed


def follow_page(page: Path, tmp_path: Path, path: str, seconds: float) -> None:
    """Follow the page, or another form of it, and check what it printed."""
    made = tmp_path / ".venv" / "bin"
    made.mkdir(parents=True)
    command = f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n'
    (made / "paceline").write_text(command)
    (made / "paceline").chmod(0o755)
    steps = follow(page, tmp_path, path, seconds)
    assert "503" in printed(steps, "health/ready")
    assert "1 pools, 2 replicas: valid" in printed(steps, "--check")
    assert "pool chat: 2 of 2 replicas are up" in printed(steps, "--check")
    told = printed(steps, "ignore_eos")
    assert re.search(r"^killed chat-[12]$", told, re.MULTILINE)
    assert told.rstrip().endswith("data: [DONE]")
    assert "all replicas have ended" in printed(steps, "fleet down")
    # both words are answered: of an engine that is not there, and of one that is drained too
    told = printed(steps, "curl -X PUT")
    assert told.count('"version":7') == 2 and told.count('"up":false') == 4, told
    assert told.count('"draining":true') == 2


@pytest.mark.docs
@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
def test_a_fleet_in_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    follow_page(PAGE, tmp_path, os.environ["PATH"], 110.0)
