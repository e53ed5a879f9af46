"""One replica's process and its file, on the host where it runs.

::

    FOLDER/chat-4.json   pid and start time of the process, its version, what it takes
    FOLDER/chat-4.out    standard output: the ready line has its address
    FOLDER/chat-4.log    standard error

The process has a session of its own and writes to files, so it outlives what started it; whatever
watches this host next finds it by its file. The log stays, and with it the name: it is never used
again.
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
# bytes of a log's end among which its last line is looked for
_TAIL_BYTES: Final = 4096


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
            found = _READY.search((folder / f"{self.name}.out").read_bytes())
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
        """Ask it to end, or end it and its engine at once."""
        if not self.lives():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if kill:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGTERM)

    def forget(self, folder: Path) -> None:
        """Remove its file; the log stays."""
        for ending in ("json", "out"):
            (folder / f"{self.name}.{ending}").unlink(missing_ok=True)


def start_replica(
    folder: Path,
    name: str,
    args: Sequence[str],
    version: str,
    *,
    exit_unwatched: float,
    resources: Mapping[str, float],
    environ: Mapping[str, str],
) -> Record:
    """Start a replica and write its file. Raises OSError.

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
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True,
            env=dict(environ),
        )  # fmt: skip
    record = Record(name, process.pid, _started(process.pid) or 0, version, dict(resources))
    # ``Record.lives`` reaps it
    process.returncode = 0
    partial = folder / f"{name}.json.part"
    write_private(partial, msgspec.json.encode(record).decode())
    partial.replace(folder / f"{name}.json")
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
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # the name in parentheses may hold anything
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
