"""The commands of docs/use/bench.md exist, and the first one runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import build_parser, main
from tests.cli.servers import start_server

PAGE = (Path(__file__).parent.parent / "docs/use/bench.md").read_text()
COMMANDS = re.findall(r"^    paceline (.*)$", PAGE, flags=re.MULTILINE)


def test_every_command_and_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) >= 5
    parser = build_parser(("bench",))
    for line in COMMANDS:
        assert callable(parser.parse_args(shlex.split(line)).run), line
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "--help"])
    known = set(re.findall(r"--[a-z][a-z0-9-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z][a-z0-9-]+", PAGE)) <= known


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
