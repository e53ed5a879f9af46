"""The pages about security and limits say what is: tests that exist, flags that exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from paceline.cli.limit_options import add_limit_options
from paceline.cli.options import Parser
from paceline.cli.serve import add_parser

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs/security.md").read_text(encoding="utf-8")
LIMITS = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
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


def test_every_flag_is_a_flag_and_every_limit_is_told() -> None:
    commands = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    add_parser(commands)
    known = flags(commands.choices["serve"])
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SECURITY + LIMITS))
    assert told <= known, told - known
    limits = Parser(prog="limits")
    add_limit_options(limits)
    assert flags(limits) - {"--help"} <= told
