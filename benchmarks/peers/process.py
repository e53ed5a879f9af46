"""Processes of peers: started, asked, frozen while others are measured, weighed, ended.

Each leads a session of its own, so that whatever it starts is found, stopped and ended with it. A
frozen process (SIGSTOP) cannot spend processor time however its threads wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.base import REPOSITORY, Command, Unavailable
from benchmarks.peers.jobs import Done, Job

__all__ = ["Process", "Worker"]

_TICK = os.sysconf("SC_CLK_TCK")
_TAIL_LINES = 4


def _session_members(session: int) -> list[int]:
    """Processes of a session, zombies too."""
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
    """A running command and all that it started.

    Raises Unavailable when it cannot be started.
    """

    def __init__(self, command: Command, log: Path, *, pipes: bool = False) -> None:
        self._log = log
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command.argv,
                    stdin=pipe,
                    stdout=pipe if pipes else errors,
                    stderr=errors,
                    env=command.environment(),
                    cwd=REPOSITORY,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"{command.argv[0]}: {error}") from None
        self._frozen = False

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """The last lines of its log, for messages."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-_TAIL_LINES:])

    def freeze(self) -> None:
        """Stop all its threads until ``thaw``."""
        self._signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def _signal(self, number: signal.Signals) -> None:
        for member in _session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)

    def cpu_seconds(self) -> float:
        """Processor time so far, of all its processes that still run."""
        ticks = 0
        for member in _session_members(self.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICK

    def idle_share(self, seconds: float) -> float:
        """Cores it keeps busy while nobody asks for anything; waits ``seconds``."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - began)

    def peak_rss_mb(self) -> float:
        """Sum over its processes of the most memory each had resident, in MiB; pages that two of
        them share count twice."""
        total = 0
        for member in _session_members(self.pid):
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


class Worker(Process):
    """A process that answers jobs; see ``jobs.serve``.

    ``about`` is what it said of itself. Loading it has taken until the constructor returns.

    Raises Unavailable when the engine does not load.
    """

    def __init__(self, command: Command, log: Path) -> None:
        super().__init__(command, log, pipes=True)
        self._buffer = b""
        try:
            self.about: dict[str, Any] = self._receive(command.start_seconds)["ready"]
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, timeout: float = 600.0) -> Done:
        """Do a job. Raises Unavailable when the worker fails or takes longer than ``timeout``
        seconds; it is of no further use then."""
        assert self._process.stdin is not None
        self.thaw()
        try:
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Unavailable(f"the worker is gone: {self.tail()}") from None
        answer = self._receive(timeout)
        done = Done(answer["seconds"], answer["output_tokens"])
        expected = job.max_tokens * len(job.prompts)
        if done.output_tokens != expected:
            raise Unavailable(f"asked for {expected} output tokens, got {done.output_tokens}")
        return done

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Unavailable(f"no answer within {timeout:.0f} s: {self.tail()}")
                data = os.read(pipe, 1 << 16)
                if not data:
                    raise Unavailable(f"the worker ended: {self.tail()}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(str(answer["error"]).strip().splitlines()[-1])
        return answer
