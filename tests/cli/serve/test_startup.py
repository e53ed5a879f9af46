"""Parts of a start."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from paceline.cli.serve.startup import Stages, process_age


def test_stages_follow_each_other(caplog: pytest.LogCaptureFixture) -> None:
    stages = Stages(0.5, 100.0)
    stages.done("import", 100.25)
    stages.done("build", 102.0)
    assert stages.total == 2.5
    with caplog.at_level(logging.INFO):
        stages.log(logging.getLogger("x"), "built")
    assert caplog.messages == ["built total=2.50 import=0.75 build=1.75"]


def test_process_age(tmp_path: Path) -> None:
    before = process_age()
    time.sleep(0.05)
    assert process_age() - before >= 0.04
    # pytest itself was started seconds, not days, ago
    assert 0 < before < 86_400
    assert process_age(stat=tmp_path / "nothing") >= 0.05
