"""docs/operate/observability.md: its commands are taken, its attributes are set, its files are
there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from paceline.cli.main import build_parser

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operate" / "observability.md").read_text()
TRACING = (ROOT / "paceline" / "server" / "observability" / "tracing.py").read_text()
GATEWAY_TRACING = (ROOT / "paceline" / "gateway" / "observability" / "tracing.py").read_text()


def test_commands_are_taken() -> None:
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^paceline (.*)$", shell, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))


def test_attributes_are_those_that_are_set() -> None:
    (table,) = re.findall(r"^\| span \| attributes \|\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"`((?:gen_ai|paceline|error)\.[\w.]+)`", table))
    listed -= {"paceline.waited.REASON"}
    assert 'f"paceline.waited.{reason}"' in TRACING
    assert listed == set(re.findall(r'"((?:gen_ai|paceline|error)\.[\w.]+)"', TRACING))


def test_attributes_of_a_gateway_are_those_that_are_set() -> None:
    pattern = re.compile(r"^\| span of a gateway \| .*?\n(.*?)\n\n", re.MULTILINE | re.DOTALL)
    (table,) = pattern.findall(PAGE)
    names = r"((?:gen_ai|paceline|error|server|http)\.[\w.]+)"
    set_there = set(re.findall(f'"{names}"', GATEWAY_TRACING))
    assert set(re.findall(f"`{names}`", table)) == set_there


def test_files_are_there() -> None:
    paths = set(re.findall(r"`(deploy/[\w./-]*)`", PAGE)) | {
        f"docs/{name}" for name in re.findall(r"docs/(\w+\.md)", PAGE)
    }
    assert len(paths) >= 6
    for path in paths:
        assert (ROOT / path).exists(), path
