"""docs/start/spend-less-on-the-cloud.md is followed to its end, with the null backend for both
models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.docs.follow import follow
from tests.docs.pages import DOCS
from tests.docs.test_start_gateway import printed, programs

PAGE = DOCS / "start/spend-less-on-the-cloud.md"


@pytest.mark.docs
@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
def test_a_newcomer_gets_there(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(programs(tmp_path).parent)
    steps = follow(PAGE, tmp_path, os.environ["PATH"], 100.0)
    told = printed(steps, "paceline calibrate")
    assert "60 labels: quality" in told and "max_loss 0.05" in told and "oracle" in told
    assert "2 engines, 2 models: the file is valid" in printed(steps, "--check")
    assert "x-paceline-cascade: " in printed(steps, "tee answer.txt")
    private = printed(steps, "tee private.txt")
    assert private.startswith("HTTP/1.1 200") and "x-paceline-engine: laptop" in private
    assert 'answered_by="small",model="chat"} ' in printed(steps, "paceline top")
