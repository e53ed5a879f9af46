"""One replica's process and its file, on the host where it runs.

::

    FOLDER/chat-4.json   pid and start time of the process, its version, what it takes
    FOLDER/chat-4.out    standard output: the ready line has its address
    FOLDER/chat-4.log    standard error

The process has a session of its own and writes to files, so it outlives what started it; whatever
watches this host next finds it by its file. The log stays, and with it the name: it is never used
again. The latest 50 logs of a pool are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from paceline.files import private_opener, write_private

__all__ = ["Record", "last_number", "read_records", "start_replica"]

_READY: Final = re.compile(rb"paceline ready: (https?://\S+?)/v1 ")
_RESTARTS: Final = "--max-engine-restarts"
# starts a process of its own session with a given standard output, and says its number
_LAUNCH: Final = """
import subprocess, sys
stdin = subprocess.DEVNULL
out, *command = sys.argv[1:]
print(subprocess.Popen(command, stdin=stdin, stdout=int(out), start_new_session=True).pid)
"""
# bytes of a log's end among which its last line is looked for
_TAIL_BYTES: Final = 4096
# bytes of its output among which the ready line is looked for
_HEAD_BYTES: Final = 64 << 10
# logs of ended replicas that a pool keeps
_KEPT_LOGS: Final = 50


class Record(msgspec.Struct, frozen=True):
    """A replica that was started on this host."""

    name: str
    pid: int
    # start time of the process, in clock ticks since boot: another process may get its number
    started: int
    version: str
    resources: Mapping[str, float] = {}

    def lives(self) -> bool:
        """Whether the process runs; one that ended is reaped if it is a child of this process."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return _started(self.pid) == self.started

    def url(self, folder: Path) -> str:
        """Return its address; "": it is not ready yet."""
        try:
            with open(folder / f"{self.name}.out", "rb") as out:
                found = _READY.search(out.read(_HEAD_BYTES))
        except OSError:
            return ""
        return found[1].decode() if found else ""

    def last_words(self, folder: Path) -> str:
        """Return the last line of its log, for people."""
        try:
            with open(folder / f"{self.name}.log", "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((line[-300:] for line in reversed(lines) if line.strip()), "")

    def end(self, *, kill: bool) -> None:
        """Ask it to end, or end it and its engine at once: an engine that hangs may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self.lives():
                if kill and _started(self.pid) is None:
                    for pid in _left_of(self.pid):
                        os.kill(pid, signal.SIGKILL)
            elif kill:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGTERM)

    def forget(self, folder: Path) -> None:
        """Remove its file; the log stays until the pool has had enough later ones."""
        for ending in ("json", "out"):
            (folder / f"{self.name}.{ending}").unlink(missing_ok=True)
        pool, _, number = self.name.rpartition("-")
        old = f"{pool}-{int(number) - _KEPT_LOGS}"
        if not (folder / f"{old}.json").exists():
            (folder / f"{old}.log").unlink(missing_ok=True)


def start_replica(
    folder: Path,
    name: str,
    args: Sequence[str],
    version: str,
    *,
    exit_unwatched: float,
    resources: Mapping[str, float],
    environ: Mapping[str, str],
    as_child: bool = True,
) -> Record:
    """Start a replica and write its file. Raises OSError.

    ``as_child``: of this process; otherwise what ends the children of this process spares it.

    It ends with its engine, unless ``args`` say otherwise: its streams go on at once at another
    replica, not only when the next engine is ready, and the controller starts another one.
    """
    command = [sys.executable, "-m", "paceline.cli.main", "serve", *args, "--port", "0"]
    command += ["--exit-unwatched", f"{exit_unwatched:g}"]
    if not any(word.partition("=")[0] == _RESTARTS for word in args):
        command += [_RESTARTS, "0"]
    with (
        open(folder / f"{name}.out", "wb", opener=private_opener) as out,
        open(folder / f"{name}.log", "ab", opener=private_opener) as log,
    ):
        if as_child:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True,
                env=dict(environ),
            )  # fmt: skip
            pid = process.pid
            # ``Record.lives`` reaps it
            process.returncode = 0
        else:
            launched = subprocess.run(
                [sys.executable, "-c", _LAUNCH, str(out.fileno()), *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=dict(environ),
                pass_fds=(out.fileno(),),
            )  # fmt: skip
            if launched.returncode:
                raise OSError("it was not launched, see its log")
            pid = int(launched.stdout)
    record = Record(name, pid, _started(pid) or 0, version, dict(resources))
    partial = folder / f"{name}.json.part"
    try:
        write_private(partial, msgspec.json.encode(record).decode())
        partial.replace(folder / f"{name}.json")
    except OSError:
        # without its file nothing would find it again
        record.end(kill=True)
        raise
    return record


def read_records(folder: Path) -> list[Record]:
    """Return the replicas that were started here, in the order of their numbers."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Record))
    return sorted(found, key=lambda each: int(each.name.rpartition("-")[2]))


def last_number(folder: Path, pool: str) -> int:
    """Return the highest number of a replica that a pool ever had here; 0: it had none."""
    numbers = (
        path.name.removeprefix(f"{pool}-").partition(".")[0] for path in folder.glob(f"{pool}-*.*")
    )
    return max((int(text) for text in numbers if text.isdigit()), default=0)


def _started(pid: int) -> int | None:
    """Return the start time of a process; None: there is none, or only what is left of it."""
    fields = _stat(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def _left_of(leader: int) -> list[int]:
    """Return our processes in the group of one that has ended: by now the group may be that of
    another program, which had the same number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            if fields and int(fields[2]) == leader and b"paceline" in path.read_bytes():
                found.append(pid)
    return found


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process from its state on; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # the name in parentheses before them may hold anything
    return stat.rpartition(b")")[2].split()
