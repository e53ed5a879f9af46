"""How many threads compute, and on which NUMA nodes.

A step of a small model is hundreds of products, of ten microseconds to a millisecond each, with a
barrier after every one. An engine keeps to one socket, because a barrier across sockets and memory
of another one are paid in each of them: docs/adr/0009-numa-nodes.md.

Only processors are bound. Memory follows by itself: a page lies on the node of the thread that
first writes it, or on another one where that is full. So a model that does not fit into its nodes'
memory is served all the same, more slowly, and nothing has to be refused for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.backends.machine import CGROUP, MEMBERSHIP, choose_threads, within_quota
from paceline.backends.topology import (
    CPUS,
    NODES,
    Node,
    allowed_cpus,
    cores_of,
    format_list,
    parse_list,
    read_nodes,
    sockets_of,
)
from paceline.core.errors import ConfigError

__all__ = ["Placement", "choose_placement"]

# what makes an OpenMP runtime bind threads by itself
_BINDERS: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine computes."""

    threads: int
    # the NUMA nodes it keeps to, such as "0" or "0-3"; "": it keeps to none
    nodes: str = ""
    # the nodes' processors that may be used; None: all, nothing is bound
    cpus: frozenset[int] | None = None
    # for people, where there were several nodes to choose from; else ""
    why: str = ""

    def describe(self, wanted: int | None) -> str:
        """Why so many threads, for people; "" where ``wanted`` is their number and there is nothing
        else to say."""
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
    cgroup: Path = CGROUP,
    membership: Path = MEMBERSHIP,
    environ: Mapping[str, str] = os.environ,
) -> Placement:
    """Threads and nodes for an engine that the calling thread is about to start.

    Args:
        threads: that many; None: as many as the nodes (or all nodes) have physical cores that this
            process may use, at most what the cgroups' quotas allow.
        numa: "auto", "off" or nodes' numbers, such as "0-1,4". auto: where processors of several
            sockets may be used, the nodes of the socket with most physical cores among them, then
            most free memory, then the lowest number; none where ``threads`` are more than its
            cores, or where ``environ`` makes an OpenMP runtime bind threads. off: all nodes,
            unbound. numbers: these nodes, of each of which some processor must be left.
        cpus, nodes, cgroup, membership: where the kernel describes the machine.

    Raises:
        ConfigError: ``threads`` or ``numa`` that this machine cannot do, with what it has.
    """
    limits = {"cgroup": cgroup, "membership": membership}
    everywhere = Placement(choose_threads(threads, cpus=cpus, **limits))
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
        count = within_quota(given.cores, **limits) if threads is None else threads
        return Placement(count, given.numbers, given.cpus)
    groups = [_Group.of(socket, allowed, cpus) for socket in sockets_of(found, root=cpus)]
    groups = [group for group in groups if group.cpus] if allowed else []
    num_nodes = sum(len(group.nodes) for group in groups)
    if num_nodes < 2:
        return everywhere
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
        which = f"bound to none of {num_nodes} NUMA nodes because {obstacle}"
        return replace(everywhere, why=f"{_count(everywhere.threads, 'thread')}, {which}")
    count = within_quota(best.cores, **limits) if threads is None else threads
    which = f"node {best.numbers} because it has"
    if len(best.nodes) > 1:
        which = f"nodes {best.numbers} because they have"
    why = (
        f"{_count(count, 'thread')} on NUMA {which} {best.cores} of the "
        f"{sum(group.cores for group in groups)} cores that may be used"
    )
    return Placement(count, best.numbers, best.cpus, why)


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that an engine may keep to, by number; of their processors those that may be used."""

    nodes: tuple[Node, ...]
    # physical cores
    cores: int

    @classmethod
    def of(cls, nodes: Iterable[Node], allowed: frozenset[int] | None, root: Path) -> _Group:
        """Of ``nodes``, those with processors that may be used."""
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
    """What binds threads, as NAME=VALUE, or "". OMP_PROC_BIND=false says that nothing does."""
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        return ""
    return next((f"{name}={environ[name]}" for name in _BINDERS if environ.get(name)), "")


def _by_number(
    numa: str, found: tuple[Node, ...], allowed: frozenset[int] | None
) -> tuple[Node, ...]:
    """The nodes of a list, on each of which some processor may be used."""
    try:
        numbers = parse_list(numa)
    except ValueError:
        numbers = frozenset()
    if not numbers:
        raise ConfigError(f"numa must be auto, off or nodes such as 0 or 0-1,4, got {numa!r}")
    if not found:
        # a kernel or a system without nodes: the machine is one
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
