"""The layout of this machine's processors: which are allowed, and their core, socket and NUMA node.

Reads what the kernel writes under /sys and /proc, and sets affinity. Knows no model, no flag and no
choice (``placement``); the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "ATOMS",
    "CPUS",
    "NODES",
    "Node",
    "allowed_cpus",
    "bind",
    "core_speeds",
    "cores_of",
    "format_list",
    "parse_list",
    "read_nodes",
    "sockets_of",
]

CPUS: Final = Path("/sys/devices/system/cpu")
NODES: Final = Path("/sys/devices/system/node")
# list of the efficiency cores of Intel's hybrid processors
ATOMS: Final = Path("/sys/devices/cpu_atom/cpus")
_TASKS: Final = Path("/proc/self/task")
# Speed of an efficiency core at a performance core's clock: its vector units are half as wide.
# With its lower clock it comes to 0.38; 0.26 to 0.4 was measured (llama.cpp's pull request 23309).
_ATOM: Final = 0.5


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node that has processors."""

    number: int
    # all of the node's that are online, whether or not this process may use them
    cpus: frozenset[int]
    # free memory without the page cache; 0 where the kernel does not report it
    free_bytes: int = 0


def parse_list(text: str) -> frozenset[int]:
    """Parse numbers of processors or nodes in the kernel's format, such as "0-3,8,10-11" or "".

    Raises ValueError for anything else, and for numbers of more than five digits: no machine has
    that many, and a mistyped range would fill the memory.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"{part!r} in {text.strip()!r} is neither a number nor a range")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Format numbers as ``parse_list`` reads them."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = 0
    for end, number in enumerate(ordered):
        if end + 1 == len(ordered) or ordered[end + 1] != number + 1:
            parts.append(str(number) if start == end else f"{ordered[start]}-{number}")
            start = end + 1
    return ",".join(parts)


def allowed_cpus() -> frozenset[int] | None:
    """Return the processors that the calling thread may run on, by affinity and cpuset; None where
    the system does not report them (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(os.sched_getaffinity(0))


def cores_of(cpus: Iterable[int], *, root: Path = CPUS) -> frozenset[str]:
    """Return the physical cores of ``cpus``, each named by the list of its hardware threads; a
    processor that the kernel does not describe is a core of its own."""
    return frozenset(
        _read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu)
        for cpu in cpus
    )


def core_speeds(
    cpus: Iterable[int], *, root: Path = CPUS, atoms: Path = ATOMS
) -> dict[str, tuple[float, frozenset[int]]]:
    """Return for each physical core, named as by ``cores_of``, its speed relative to the quickest
    (1.0), and which of ``cpus`` belong to it.

    The speed is the kernel's own measure (``cpu_capacity``: ARM, and Intel's hybrid processors
    since Linux 6.12) where that tells cores apart, else the highest clock (``cpufreq``). Where the
    kernel lacks it for some core, all cores count as alike.
    """
    cores: dict[str, set[int]] = {}
    for cpu in cpus:
        (name,) = cores_of((cpu,), root=root)
        cores.setdefault(name, set()).add(cpu)
    try:
        slow = parse_list(_read(atoms))
    except ValueError:
        slow = frozenset()
    speeds: list[float] = []
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = [_read(root / f"cpu{min(own)}" / file).strip() for own in cores.values()]
        if all(re.fullmatch(r"[1-9]\d*", each) for each in texts) and len(set(texts)) > 1:
            speeds = [float(each) for each in texts]
            break
    speeds = speeds or [1.0] * len(cores)
    speeds = [
        speed * (1.0 if slow.isdisjoint(own) else _ATOM)
        for speed, own in zip(speeds, cores.values(), strict=True)
    ]
    return {
        name: (speed / max(speeds), frozenset(own))
        for speed, (name, own) in zip(speeds, cores.items(), strict=True)
    }


def read_nodes(*, root: Path = NODES) -> tuple[Node, ...]:
    """Return the nodes that have processors, by number; () where the kernel knows none.

    Left out: nodes of memory alone (CXL, HBM), and any whose list cannot be read.
    """
    try:
        names = os.listdir(root)
    except OSError:
        return ()
    numbers = sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))
    nodes = []
    for number in numbers:
        folder = root / f"node{number}"
        try:
            cpus = parse_list(_read(folder / "cpulist"))
        except ValueError:
            continue
        if cpus:
            free = re.search(r"MemFree:\s+(\d+) kB", _read(folder / "meminfo"))
            nodes.append(Node(number, cpus, int(free[1]) * 1024 if free else 0))
    return tuple(nodes)


def sockets_of(nodes: Iterable[Node], *, root: Path = CPUS) -> tuple[tuple[Node, ...], ...]:
    """Group ``nodes`` by the physical package of their processors.

    A node whose processors are in several packages, or in an unknown one, is a group of its own.
    """
    sockets: dict[int | str, list[Node]] = {}
    for node in nodes:
        packages = {
            _read(root / f"cpu{cpu}" / "topology" / "physical_package_id").strip()
            for cpu in node.cpus
        }
        known = len(packages) == 1 and packages.isdisjoint({"", "-1"})
        sockets.setdefault(packages.pop() if known else node.number, []).append(node)
    return tuple(tuple(group) for group in sockets.values())


def bind(cpus: frozenset[int], *, whole_process: bool, tasks: Path = _TASKS) -> str:
    """Let the calling thread, and threads that it starts from now on, run on ``cpus`` only.

    Args:
        whole_process: bind all existing threads of this process too, as far as the system lists
            them and permits it.
        tasks: a folder with an entry per thread of the process, named by id.

    Returns:
        Why it was not done, or "". The calling thread comes first, so then nothing was done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return "this system binds no processes"
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return str(error)
    done: set[int] = set()
    # a thread that was not reached yet may have started another
    while whole_process:
        try:
            fresh = {int(task) for task in os.listdir(tasks)} - done
        except OSError:
            # no /proc: the calling thread starts the threads that compute, so they are bound anyway
            break
        if not fresh:
            break
        for task in fresh:
            # the thread may have ended, or a cpuset of its own keeps it elsewhere
            with contextlib.suppress(OSError):
                os.sched_setaffinity(task, cpus)
        done |= fresh
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
