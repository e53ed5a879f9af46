"""The command line as a whole."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from paceline.cli.main import build_parser

COMMANDS = (
    "serve", "gateway", "fleet", "chat", "run", "generate", "pull", "list", "rm", "quantize", "ps",
    "top", "trace", "doctor", "plan", "simulate", "bench", "calibrate",
)  # fmt: skip


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: command.format_help() for name, command in action.choices.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_same_alone(name: str) -> None:
    whole = helps(build_parser())
    assert tuple(whole) == COMMANDS
    assert helps(build_parser((name,))) == {name: whole[name]}


def test_only_the_named_command_is_imported() -> None:
    code = """
import sys
from paceline.cli.main import main
try:
    main(["pull", "--list"])
finally:
    others = {
        "models.list", "offline.chat", "offline.run", "serve.command", "simulation.plan",
        "simulation.simulate", "watch.doctor", "watch.ps", "watch.top", "watch.trace",
    }
    found = [name for name in others if f"paceline.cli.{name}" in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m" in done.stdout


def test_what_is_no_command_names_them_all() -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "sreve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    for name in COMMANDS:
        assert f"'{name}'" in done.stderr


def test_no_help_says_a_thing_twice() -> None:
    words = r"\b([a-zA-Z]+(?: [a-zA-Z]+){0,3})"
    twice = re.compile(rf"{words} (?:of )?\1\b|{words}[;,] \2[;,]")
    parsers = [build_parser()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            assert not twice.search(action.help or ""), action.help
    assert len(parsers) > len(COMMANDS)
