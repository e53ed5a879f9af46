"""The first command of docs/use/bench.md runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.cli.servers import start_server

PAGE = (Path(__file__).parent.parent / "docs/use/bench.md").read_text()
COMMANDS = re.findall(r"^    paceline (.*)$", PAGE, flags=re.MULTILINE)


def test_the_first_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(COMMANDS[0])
    assert words[:3] == ["bench", "--rate", "4"]
    # the same, but not 50 seconds of it
    words += ["--rate", "60", "--num-requests", "40", "--output-len", "5"]
    with start_server("--backend", "null") as server:
        assert main([*words, "--url", server.address]) == 0
    printed = capsys.readouterr().out
    for figure in ("requests/s offered", "TTFT", "goodput", "attainment", "sent late"):
        assert figure in printed
