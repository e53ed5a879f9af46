"""Which of the 60 command lines start, and what the others are told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.common.processes import REPOSITORY, Process
from benchmarks.common.processes import Command as Argv
from benchmarks.front_door.commands import Command, commands
from benchmarks.front_door.stand_in import CHAT_TEMPLATE, write_model

__all__ = ["Start", "start_all"]

_READY: Final = "paceline ready: "
_FLAG: Final = "paceline.cli: flag given="
_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """Outcome of one command."""

    command: Command
    started: bool
    # "FLAG here=WHAT" of the start log, or the last line of a refusal
    said: tuple[str, ...]


def start_all(folder: Path) -> Iterator[Start]:
    """Start each command of the list in turn with a tiny model in ``folder``, and end it."""
    model = str(write_model(folder / "model"))
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    for number, command in enumerate(commands()):
        words = command.arguments(model, str(template))
        log = folder / f"{number}.log"
        yield (_serve if words[0] == "serve" else _run)(command, words, log)


def _serve(command: Command, words: tuple[str, ...], log: Path) -> Start:
    """Start a server on a free port: the one that the command names may be taken here."""
    argv = (sys.executable, "-m", "paceline.cli.main", *words, "--port", "0")
    with Process(Argv(argv, tuple(command.environment.items())), log) as server:
        deadline = time.monotonic() + _SECONDS
        while server.alive and time.monotonic() < deadline and _READY not in server.log():
            time.sleep(0.05)
        lines = server.log().splitlines()
    started = any(line.startswith(_READY) for line in lines)
    found = tuple(line.partition(_FLAG)[2] for line in lines if _FLAG in line)
    return Start(command, started, found if started else tuple(lines[-1:]))


def _run(command: Command, words: tuple[str, ...], log: Path) -> Start:
    """Ask once, or hold a conversation that ends at once."""
    argv = (sys.executable, "-m", "paceline.cli.main", *words)
    done = subprocess.run(
        argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    log.write_text(done.stdout + done.stderr)
    return Start(command, done.returncode == 0, tuple(done.stderr.splitlines()[-1:]))
