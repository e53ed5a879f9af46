"""Processes: started, frozen while others are measured, their time and memory read, ended.

Each leads a session of its own, so that whatever it starts is found, stopped and ended with it. A
frozen process (SIGSTOP) cannot spend processor time however its threads wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, Self

__all__ = ["REPOSITORY", "Command", "Process", "Unavailable", "free_port"]

REPOSITORY = Path(__file__).resolve().parents[2]
_TICK = os.sysconf("SC_CLK_TCK")
_TAIL_LINES = 4


class Unavailable(Exception):
    """An engine or tool cannot be set up or run here; the text says why, for the report."""


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: worker or server. Equal commands share one process."""

    argv: tuple[str, ...]
    # added to this process's environment
    env: tuple[tuple[str, str], ...] = ()
    # a worker's first message, or a server's first token, must come within this
    start_seconds: float = field(default=300.0, compare=False)

    def environment(self) -> dict[str, str]:
        return {**os.environ, **dict(self.env)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# processes that were started and are not closed yet
_open: Final[set[Process]] = set()


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _heed_sigterm() -> None:
    """Let SIGTERM end this process like an exception while processes are open, or frozen ones would
    outlive it; any other handler than the default stays. Signals are handled in the main thread:
    elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if _open and handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    elif not _open and handler is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _session_members(session: int) -> list[int]:
    """Return the processes of a session, zombies too."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # the command's name, in brackets, may hold anything
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    members.append(int(entry.name))
    return members


class Process:
    """A running command and all that it started; its standard error, and without ``pipes`` its
    output too, go to ``log``.

    Raises Unavailable when it cannot be started.
    """

    def __init__(
        self, command: Command, log: Path, *, pipes: bool = False, cwd: Path = REPOSITORY
    ) -> None:
        self._log = log
        _open.add(self)
        _heed_sigterm()
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command.argv,
                    stdin=pipe,
                    stdout=pipe if pipes else errors,
                    stderr=errors,
                    env=command.environment(),
                    cwd=cwd,
                    start_new_session=True,
                )
            except OSError as error:
                _open.discard(self)
                _heed_sigterm()
                raise Unavailable(f"{command.argv[0]}: {error}") from None
        self._frozen = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        self._process.send_signal(number)

    def tail(self) -> str:
        """Return the last lines of its log, for messages."""
        lines = self.log().strip().splitlines()
        return " | ".join(lines[-_TAIL_LINES:])

    def freeze(self) -> None:
        """Stop all its threads until ``thaw``."""
        self._signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def members(self) -> list[int]:
        """Return the process and its descendants, zombies too."""
        return _session_members(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        for member in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)

    def cpu_seconds(self) -> float:
        """Return the processor time so far, s, of all its processes that still run."""
        ticks = 0
        for member in self.members():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICK

    def idle_share(self, seconds: float) -> float:
        """Return the cores that it keeps busy without any request; waits ``seconds``."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - began)

    def peak_rss_mb(self) -> float:
        """Return the sum of its processes' peak resident memory, in MiB; pages that two of them
        share count twice."""
        total = 0
        for member in self.members():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{member}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1])
        return total / 1024

    def close(self, grace: float = 10.0) -> None:
        """Ask it to end, then end it and everything it started. Idempotent."""
        self.thaw()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.alive:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._signal(signal.SIGKILL)
        self._process.wait()
        _open.discard(self)
        _heed_sigterm()
