"""The pages about security and limits say what is: tests that exist, flags that exist."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.limit_options import add_limit_options
from paceline.cli.serve.command import add_parser

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
LIMITS = (ROOT / "docs/operate/limits.md").read_text(encoding="utf-8")
_TOOLS = ("bash", "curl", "openssl", "sha256sum", "timeout")
ROWS = [
    line.split(" | ")
    for line in SECURITY.partition("| fault | what holds | test |")[2].splitlines()
    if line.startswith("| ")
]


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip("| ")[:40] for row in ROWS])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    files = re.findall(r"`(\w+(?:/\w+)+\.py)`", row[-1])
    assert files, row
    sources = ""
    for name in files:
        path = ROOT / "tests" / name
        assert path.is_file(), name
        sources += path.read_text(encoding="utf-8")
    for name in re.findall(r"`(test_\w+)`", row[-1]):
        assert f"def {name}(" in sources, name


def test_there_are_rows() -> None:
    assert len(ROWS) > 30


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in _TOOLS),
    reason=f"this machine lacks one of {', '.join(_TOOLS)}",
)
def test_the_example_of_limits_works_as_printed(tmp_path: Path) -> None:
    block = LIMITS.partition("To try it")[2].partition("-->\n")[2].partition("\n\n")[0]
    script = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    assert script.startswith("KEY=") and "localhost:8000" in script
    # any free port instead of the printed one, and more patience with a server that starts
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = script.replace("localhost:8000", f"127.0.0.1:{port}").replace(
        "--retry 30", "--retry 90"
    )
    script = script.replace(
        "paceline serve", f"{sys.executable} -m paceline.cli.main serve --port {port}"
    )
    assert "8000" not in script
    done = subprocess.run(
        # ends the server too, which would keep the output open
        ["timeout", "100", "bash", "-uc", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said = [line.strip().lower() for line in done.stdout.splitlines() if ": http" not in line]
    statuses = [line.split()[1] for line in said if line.startswith("http/")]
    assert statuses == ["200", "200", "429"], (done.stdout, done.stderr)
    left = [line.split(": ")[1] for line in said if line.startswith("x-ratelimit-remaining-")]
    assert left == ["1", "0", "0"]
    assert any(line.startswith("retry-after: ") for line in said)


def test_every_flag_is_a_flag_and_every_limit_is_told() -> None:
    commands = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    add_parser(commands)
    known = flags(commands.choices["serve"])
    ours = "\n".join(x for x in (SECURITY + LIMITS).splitlines() if "curl " not in x)
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert told <= known, told - known
    limits = Parser(prog="limits")
    add_limit_options(limits)
    assert flags(limits) - {"--help"} <= told
