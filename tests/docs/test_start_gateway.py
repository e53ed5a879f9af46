"""docs/start/gateway-in-ten-minutes.md is followed to its end, with the null backend for the
default model."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.follow import Step, follow
from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "start/gateway-in-ten-minutes.md"


def programs(folder: Path) -> Path:
    """Holds a `paceline` whose servers need no model, and have the name of the page's."""
    made = folder / "venv" / "bin"
    made.mkdir(parents=True)
    null = "--backend null --null-step-time 0.01 --served-model-name smollm2-135m"
    # and no formats, which there are none of without weights
    (made / "paceline").write_text(
        f"""#!/bin/bash
export PYTHONPATH={ROOT}
run="{sys.executable} -m paceline.cli.main"
case "$1" in
serve) exec $run serve {null} $(sed "s,^serve,,; s,--dtype q4,," <<< "$*") ;;
*) exec $run "$@" ;;
esac
"""
    )
    (made / "paceline").chmod(0o755)
    return made


def printed(steps: list[Step], words: str) -> str:
    (step,) = [step for step in steps if words in step.block.code]
    return step.printed


@pytest.mark.docs
@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
def test_a_newcomer_gets_there(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(programs(tmp_path).parent)
    steps = follow(PAGE, tmp_path, os.environ["PATH"], 100.0)
    asked = json.loads(printed(steps, "paceline gateway --engine"))
    assert asked["usage"]["completion_tokens"] > 0
    assert "2 engines, 1 models: the file is valid" in printed(steps, "--check")
    killed = printed(steps, "Tell me a long story")
    (first,) = re.findall(r"^killed ([ab])$", killed, re.MULTILINE)
    assert killed.rstrip().endswith("data: [DONE]")
    (last,) = [line for line in killed.splitlines() if '"paceline":' in line]
    note = json.loads(last.removeprefix("data: "))["paceline"]
    assert note["resumed"] == 1 and {note["engine"], first} == {"a", "b"}
    fallback = printed(steps, "tee fallback.txt")
    assert fallback.startswith("HTTP/1.1 200") and "x-paceline-fallback: small" in fallback
    assert printed(steps, "x-paceline-allow").startswith("503\n")
    tops = [step.printed for step in steps if "paceline top" in step.block.code]
    assert "1 of 3 engines" in tops[0] and "small" in tops[0] and "2 of 3 engines" in tops[1]
