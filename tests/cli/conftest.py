"""Commands that end by themselves, run in this process: what a shell would see of them.

Starting a program costs most of a second of imports; the tests that are about signals, pipes and
exits start one.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import pytest

from paceline.cli.main import main


class Done(NamedTuple):
    """Named as in ``subprocess.CompletedProcess``."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``paceline ARGUMENTS`` with ``stdin`` as its input. An unhandled exception is one here too.

    What its own processes print is in ``stdout`` and ``stderr``, as are its log lines.
    """

    def run(*arguments: object, stdin: str = "") -> Done:
        # a file of the system, as commands may read it by its descriptor
        given = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        given.write(stdin)
        given.seek(0)
        monkeypatch.setattr(sys, "stdin", given)
        # pytest's own handlers would keep the command from setting up its log
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        root.handlers.clear()
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            assert isinstance(ended.code, int), ended.code
            code = ended.code
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            given.close()
        return Done(code, *capfd.readouterr())

    return run
