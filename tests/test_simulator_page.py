"""The quick commands of docs/understand/simulator.md run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import main

PAGE = (Path(__file__).parent.parent / "docs/understand/simulator.md").read_text()
COMMANDS = re.findall(r"^    paceline (.*)$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=() if line.startswith("plan memory") else pytest.mark.thorough)
        for line in COMMANDS
        if line.startswith(("plan", "simulate"))
    ],
)
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def test_the_exercise_has_the_answer_that_the_page_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan", "memory", "--preset", "80gb-40gb"])
    printed = capsys.readouterr().out
    for count, text in (("18", "18 sequences"), ("71", "or 71 of 512")):
        assert re.search(rf"\b{count} sequences", printed) and text in PAGE
