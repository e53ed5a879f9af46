"""How many threads compute, and on which NUMA node.

A step of a small model is hundreds of products, of ten microseconds to a millisecond each, with a
barrier after every one. An engine keeps to one node, because a barrier across sockets and memory of
another one are paid in each of them: docs/adr/0009-numa-nodes.md.

Only processors are bound. Memory follows by itself: a page lies on the node of the thread that
first writes it, or on another one where that is full. So a model that does not fit into its node's
memory is served all the same, more slowly, and nothing has to be refused for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    format_cpus,
    read_nodes,
)
from paceline.core.errors import ConfigError

__all__ = ["Placement", "choose_placement"]

# what makes an OpenMP runtime bind threads by itself
_BINDERS: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine computes."""

    threads: int
    # the NUMA node it keeps to; None: it keeps to none
    node: int | None = None
    # the node's processors that may be used; None: all, nothing is bound
    cpus: frozenset[int] | None = None
    # for people, where there were several nodes to choose from; else ""
    why: str = ""


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
    """Threads and node for an engine that the calling thread is about to start.

    Args:
        threads: that many; None: as many as the node (or all nodes) has physical cores that this
            process may use, at most what the cgroups' quotas allow.
        numa: "auto", "off" or a node's number. auto: where processors of several nodes may be used,
            the node with most physical cores among them, then most free memory, then the lowest
            number; no node where ``threads`` are more than it has cores, or where ``environ`` makes
            an OpenMP runtime bind threads. off: all nodes, unbound.
        cpus, nodes, cgroup, membership: where the kernel describes the machine.

    Raises:
        ConfigError: ``threads`` or ``numa`` that this machine cannot do, with what it has.
    """
    limits = {"cgroup": cgroup, "membership": membership}
    everywhere = Placement(choose_threads(threads, cpus=cpus, **limits))
    if numa == "off":
        return everywhere
    if numa != "auto" and not (numa.isascii() and numa.isdigit()):
        raise ConfigError(f"numa must be auto, off or the number of a node, got {numa!r}")
    allowed = allowed_cpus()
    found = read_nodes(root=nodes)
    binder = _binder(environ)
    if numa != "auto":
        if binder:
            raise ConfigError(f"--numa {numa} and {binder} both bind threads: leave one out")
        node = _usable_node(int(numa), found, allowed)
        cores = len(cores_of(node.cpus, root=cpus))
        count = within_quota(cores, **limits) if threads is None else threads
        return Placement(count, node.number, node.cpus)
    usable = [replace(node, cpus=node.cpus & allowed) for node in found] if allowed else []
    usable = [node for node in usable if node.cpus]
    if len(usable) < 2:
        return everywhere
    counts = {node.number: len(cores_of(node.cpus, root=cpus)) for node in usable}
    best = max(usable, key=lambda node: (counts[node.number], node.free_bytes, -node.number))
    cores = counts[best.number]
    obstacle = ""
    if binder:
        obstacle = f"{binder} binds threads"
    elif threads is not None and threads > cores:
        obstacle = f"none has more than {_count(cores, 'core')}"
    if obstacle:
        which = f"bound to none of {len(usable)} NUMA nodes because {obstacle}"
        return replace(everywhere, why=f"{_count(everywhere.threads, 'thread')}, {which}")
    count = within_quota(cores, **limits) if threads is None else threads
    why = (
        f"{_count(count, 'thread')} on NUMA node {best.number} because it has {cores} of the "
        f"{sum(counts.values())} cores that may be used"
    )
    return Placement(count, best.number, best.cpus, why)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _binder(environ: Mapping[str, str]) -> str:
    """What binds threads, as NAME=VALUE, or "". OMP_PROC_BIND=false says that nothing does."""
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        return ""
    return next((f"{name}={environ[name]}" for name in _BINDERS if environ.get(name)), "")


def _usable_node(number: int, found: tuple[Node, ...], allowed: frozenset[int] | None) -> Node:
    """A node by its number, with those of its processors that may be used."""
    if not found:
        # a kernel or a system without nodes: the machine is one
        every = allowed or frozenset(range(os.cpu_count() or 1))
        found = (Node(0, every),)
    for node in found:
        if node.number == number:
            usable = node.cpus if allowed is None else node.cpus & allowed
            if not usable:
                raise ConfigError(
                    f"--numa {number} leaves no processor: the node has CPUs "
                    f"{format_cpus(node.cpus)}, and this process may use "
                    f"{format_cpus(allowed or ())}"
                )
            return replace(node, cpus=usable)
    listed = ", ".join(f"{node.number} (CPUs {format_cpus(node.cpus)})" for node in found)
    raise ConfigError(f"--numa {number} is no NUMA node with processors; this machine has {listed}")
