"""``paceline ps``: list this user's servers on this machine.

There is no register of them that could be out of date: ``/proc`` shows the processes started as
``paceline serve`` and the ports on which they listen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.options import DEFAULT_MODEL
from paceline.cli.terminal.table import table

__all__ = ["Server", "add_parser", "servers"]

_LISTENS: Final = "0A"


@dataclass(frozen=True, slots=True)
class Server:
    """One running ``paceline serve``."""

    pid: int
    model: str
    # ports it listens on; several with --metrics-port, none while it starts
    ports: tuple[int, ...]
    # bytes of its processes together
    memory: int
    # seconds since its start
    age: float


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "ps",
        help="list the servers that run on this machine",
        description="List this user's servers on this machine; 'paceline top' watches one.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [("PID", "MODEL", "PORTS", "MEMORY", "UP")]
    for server in servers():
        if args.json:
            print(json.dumps(asdict(server)))
        rows.append(
            (
                str(server.pid),
                server.model,
                ",".join(map(str, server.ports)) or "(starting)",
                f"{server.memory / 1e6:.0f} MB",
                f"{server.age / 60:.0f} min",
            )
        )
    if not args.json:
        print(table(rows))
    return 0


def servers(proc: Path = Path("/proc")) -> Iterator[Server]:
    """Yield servers by process id. One that ends meanwhile is left out."""
    pids = sorted(int(path.name) for path in proc.iterdir() if path.name.isdigit())
    parents = {pid: parent for pid in pids if (parent := _parent(proc, pid)) is not None}
    for pid in pids:
        with contextlib.suppress(OSError):
            model = _model(_command(proc, pid))
            if model is None or (proc / str(pid)).stat().st_uid != os.getuid():
                continue
            family = {pid} | {child for child, parent in parents.items() if parent == pid}
            yield Server(
                pid,
                model,
                _ports(proc, pid),
                sum(_memory(proc, each) for each in family),
                time.time() - (proc / str(pid)).stat().st_mtime,
            )


def _command(proc: Path, pid: int) -> list[str]:
    return (proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]


def _model(command: Sequence[str]) -> str | None:
    """Return the model of a ``paceline serve``, or None for another command."""
    for place, word in enumerate(command[:-1]):
        is_ours = os.path.basename(word) == "paceline" or word == "paceline.cli.main"
        if is_ours and command[place + 1] == "serve":
            flags = command[place + 2 :]
            break
    else:
        return None
    for place, word in enumerate(flags):
        if word == "--backend" and flags[place + 1 : place + 2] == ["null"]:
            return "null"
        if word == "--model" and place + 1 < len(flags):
            return flags[place + 1]
        if word.startswith("--model="):
            return word.partition("=")[2]
    # the model comes first, or wherever no flag takes it as its value
    return flags[0] if flags and not flags[0].startswith("-") else DEFAULT_MODEL


def _parent(proc: Path, pid: int) -> int | None:
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _memory(proc: Path, pid: int) -> int:
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.M)
    return int(found[1]) * 1024 if found else 0


def _ports(proc: Path, pid: int) -> tuple[int, ...]:
    inodes = set()
    for entry in (proc / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            if found:
                inodes.add(found[1])
    ports = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / str(pid) / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))
