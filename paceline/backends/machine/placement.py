"""How many threads compute, and on which NUMA nodes.

A step of a small model is hundreds of products of ten microseconds to a millisecond, with a barrier
after every one. An engine keeps to one socket, because each product would pay for a barrier across
sockets and for memory of another socket: docs/adr/0009-numa-nodes.md.

Only threads are bound to processors. Memory follows: a page lies on the node of the thread that
first writes it, or on another node where that one is full. So a model that exceeds its nodes'
memory is still served, more slowly, and need not be refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.backends.machine.cpu import (
    CGROUP,
    MEMBERSHIP,
    choose_threads,
    num_cores,
    processor_quota,
    within_quota,
)
from paceline.backends.machine.topology import (
    ATOMS,
    CPUS,
    NODES,
    Node,
    allowed_cpus,
    core_speeds,
    cores_of,
    format_list,
    parse_list,
    read_nodes,
    sockets_of,
)
from paceline.errors import ConfigError

__all__ = ["Placement", "choose_placement", "quick_cores"]

# cores with at least this share of the quickest one's speed are taken with it
_ALIKE: Final = 0.8
# Work is divided equally, so a step ends with the slowest core: slower cores join where all, each
# at the pace of the slowest, are this many times as quick as the quick ones alone.
_GAIN: Final = 1.25
# variables that make an OpenMP runtime bind threads by itself
_BINDERS: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True, slots=True)
class Placement:
    """The threads, nodes and processors that an engine computes with."""

    threads: int
    # NUMA nodes it keeps to, such as "0" or "0-3"; "": it keeps to none
    nodes: str = ""
    # processors of these nodes, or of the quicker cores, that may be used; None: nothing is bound
    cpus: frozenset[int] | None = None
    # reason, for users, where nodes, kinds of cores or a quota mattered; else ""
    why: str = ""

    def describe(self, wanted: int | None) -> str:
        """Return, for users, why this number of threads was chosen; "" where it is ``wanted`` and
        there is nothing else to say."""
        if self.why or wanted is not None:
            return self.why
        cores = f"the cores of NUMA nodes {self.nodes}" if self.nodes else "cores"
        return f"{_count(self.threads, 'thread')}, as many as {cores} and quotas allow"


def choose_placement(
    threads: int | None,
    numa: str = "auto",
    *,
    cpus: Path = CPUS,
    nodes: Path = NODES,
    atoms: Path = ATOMS,
    cgroup: Path = CGROUP,
    membership: Path = MEMBERSHIP,
    environ: Mapping[str, str] = os.environ,
) -> Placement:
    """Choose threads and nodes for an engine that the calling thread is about to start.

    Args:
        threads: the number; None: the physical cores of the nodes (or of all nodes) that this
            process may use, at most what the cgroups' quotas allow.
        numa: "auto", "off" or nodes' numbers, such as "0-1,4". auto: where processors of several
            sockets may be used, the nodes of the socket with most physical cores among them, then
            most free memory, then the lowest number; none where ``threads`` are more than its
            cores, or where ``environ`` makes an OpenMP runtime bind threads. Where they are of one
            socket, its quicker cores under the same conditions, if some are slower. off: all nodes
            and cores, unbound. numbers: these nodes; each must have a processor that may be used.
        cpus, nodes, atoms, cgroup, membership: where the kernel describes the machine.

    Raises:
        ConfigError: ``threads`` or ``numa`` that this machine does not have; it says what it has.
    """
    limits = {"cgroup": cgroup, "membership": membership}
    if threads is not None:
        threads = choose_threads(threads)
    found = _choose(threads, numa, cpus, nodes, atoms, environ)
    quota = processor_quota(**limits)
    count, where = found.threads, found.why
    if threads is None:
        count = within_quota(count, **limits)
    if count < found.threads:
        where += f", no more because a control group allows {quota:g} processors"
    elif count > max(1.0, quota):
        where += f", which a control group that allows {quota:g} processors will stop now and then"
    return replace(found, threads=count, why=where and f"{_count(count, 'thread')}{where}")


def _choose(
    threads: int | None,
    numa: str,
    cpus: Path,
    nodes: Path,
    atoms: Path,
    environ: Mapping[str, str],
) -> Placement:
    """Choose as ``choose_placement`` does, without quotas; ``why`` continues after the number."""
    everywhere = Placement(num_cores(cpus=cpus) if threads is None else threads)
    if numa == "off":
        return everywhere
    allowed = allowed_cpus()
    found = read_nodes(root=nodes)
    binder = _binder(environ)
    if numa != "auto":
        asked = _by_number(numa, found, allowed)
        if binder:
            raise ConfigError(f"--numa {numa} and {binder} both bind threads: leave one out")
        given = _Group.of(asked, allowed, cpus)
        return Placement(threads or given.cores, given.numbers, given.cpus)
    groups = [_Group.of(socket, allowed, cpus) for socket in sockets_of(found, root=cpus)]
    groups = [group for group in groups if group.cpus] if allowed else []
    num_nodes = sum(len(group.nodes) for group in groups)
    if num_nodes < 2:
        speeds = core_speeds(allowed or (), root=cpus, atoms=atoms)
        return _on_quick_cores(everywhere, threads, speeds, binder)
    best = max(groups, key=lambda group: (group.cores, group.free_bytes, -group.nodes[0].number))
    obstacle = ""
    if len(groups) == 1:
        obstacle = "they are of one socket"
    elif binder:
        obstacle = f"{binder} binds threads"
    elif threads is not None and threads > best.cores:
        none = "none" if num_nodes == len(groups) else "no socket"
        obstacle = f"{none} has more than {_count(best.cores, 'core')}"
    if obstacle:
        which = f", bound to none of {num_nodes} NUMA nodes because {obstacle}"
        return replace(everywhere, why=which)
    which = f"node {best.numbers} because it has"
    if len(best.nodes) > 1:
        which = f"nodes {best.numbers} because they have"
    why = (
        f" on NUMA {which} {best.cores} of the "
        f"{sum(group.cores for group in groups)} cores that may be used"
    )
    return Placement(threads or best.cores, best.numbers, best.cpus, why)


def _on_quick_cores(
    everywhere: Placement,
    threads: int | None,
    cores: Mapping[str, tuple[float, frozenset[int]]],
    binder: str,
) -> Placement:
    """Choose the quicker cores of one socket, or ``everywhere`` where none is slower; otherwise as
    ``_choose``."""
    quick = quick_cores({name: speed for name, (speed, _) in cores.items()})
    if len(quick) == len(cores):
        return everywhere
    count = threads or len(quick)
    which = f"the {len(quick)} quicker ones of {len(cores)} cores"
    if count > len(quick):
        return Placement(count, why=f", bound to no cores because they are more than {which}")
    if binder:
        return Placement(count, why=f" for {which}, unbound because {binder} binds threads")
    own = frozenset(cpu for name in quick for cpu in cores[name][1])
    return Placement(count, cpus=own, why=f" on {which}, CPUs {format_list(own)}")


def quick_cores(speeds: Mapping[str, float]) -> frozenset[str]:
    """Return the cores that finish a step soonest together, by their names and speeds: all that are
    about as quick as the quickest, and each slower kind whose number makes up for its pace.
    """
    ordered = sorted(speeds.items(), key=lambda each: -each[1])
    taken, score = 0, 0.0
    for count, (_, speed) in enumerate(ordered, 1):
        # all cores of equal speed are taken, or none of them
        if count < len(ordered) and ordered[count][1] == speed:
            continue
        if speed >= _ALIKE * ordered[0][1] or count * speed >= _GAIN * score:
            taken, score = count, count * speed
    return frozenset(name for name, _ in ordered[:taken])


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that an engine may keep to, by number, with their processors that may be used."""

    nodes: tuple[Node, ...]
    # physical cores
    cores: int

    @classmethod
    def of(cls, nodes: Iterable[Node], allowed: frozenset[int] | None, root: Path) -> _Group:
        """Make a group of those ``nodes`` that have processors that may be used."""
        if allowed is not None:
            nodes = [replace(node, cpus=node.cpus & allowed) for node in nodes]
        usable = tuple(node for node in nodes if node.cpus)
        cores = cores_of((cpu for node in usable for cpu in node.cpus), root=root)
        return cls(usable, len(cores))

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def free_bytes(self) -> int:
        return sum(node.free_bytes for node in self.nodes)

    @property
    def numbers(self) -> str:
        return format_list(node.number for node in self.nodes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _binder(environ: Mapping[str, str]) -> str:
    """Return what binds threads, as NAME=VALUE, or "". OMP_PROC_BIND=false means nothing does."""
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        return ""
    return next((f"{name}={environ[name]}" for name in _BINDERS if environ.get(name)), "")


def _by_number(
    numa: str, found: tuple[Node, ...], allowed: frozenset[int] | None
) -> tuple[Node, ...]:
    """Return the nodes that a list names. Raises ConfigError where one has no usable processor."""
    try:
        numbers = parse_list(numa)
    except ValueError:
        numbers = frozenset()
    if not numbers:
        raise ConfigError(f"numa must be auto, off or nodes such as 0 or 0-1,4, got {numa!r}")
    if not found:
        # a kernel or a system without nodes: the whole machine counts as one
        found = (Node(0, allowed or frozenset(range(os.cpu_count() or 1))),)
    unknown = numbers - {node.number for node in found}
    if unknown:
        raise ConfigError(
            f"--numa {numa}: no NUMA node with processors is numbered {format_list(unknown)}; "
            f"this machine has {_listed(found)}"
        )
    asked = tuple(node for node in found if node.number in numbers)
    empty = [node for node in asked if allowed is not None and not node.cpus & allowed]
    if empty:
        raise ConfigError(
            f"--numa {numa} leaves no processor on {_listed(empty)}: this process may use CPUs "
            f"{format_list(allowed or ())}"
        )
    return asked


def _listed(nodes: Iterable[Node]) -> str:
    return ", ".join(f"node {node.number} (CPUs {format_list(node.cpus)})" for node in nodes)
