"""Threads and node, chosen on machines that are described in folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.backends.placement import Placement, _count
from paceline.backends.topology import format_cpus, parse_cpus
from paceline.core.errors import ConfigError
from tests.backends.machines import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def summary(placement: Placement) -> tuple[int, int | None, str | None]:
    cpus = placement.cpus
    return placement.threads, placement.node, None if cpus is None else format_cpus(cpus)


@pytest.mark.parametrize(
    ("allowed", "threads", "node", "cpus"),
    [
        # a tie, of which nothing is known: the first
        ("0-15", 4, 0, "0-3,8-11"),
        # three cores of node 0, four of node 1
        ("0-2,4-7", 4, 1, "4-7"),
        # more processors on node 0, but of fewer cores
        ("0-1,8-9,4-6", 3, 1, "4-6"),
        # one core of node 0 is there with one of its threads
        ("0-3,8-10,4,12", 4, 0, "0-3,8-10"),
    ],
)
def test_auto_takes_the_node_with_most_cores(
    machine: Machine, allowed: str, threads: int, node: int, cpus: str
) -> None:
    machine.allow(allowed)
    assert summary(machine.place()) == (threads, node, cpus)


@pytest.mark.parametrize(
    ("free", "node"), [([100, 101], 1), ([101, 100], 0), ([100, 100], 0), ([0, 1], 1)]
)
def test_ties_go_to_free_memory_then_to_the_lowest_number(
    machine: Machine, free: list[int], node: int
) -> None:
    machine.free(free)
    assert machine.place().node == node
    # more cores count more than more memory
    machine.allow("0-2,4-7")
    assert machine.place().node == 1


def test_why(machine: Machine) -> None:
    machine.allow("0-2,4-7")
    assert machine.place().why == (
        "4 threads on NUMA node 1 because it has 4 of the 7 cores that may be used"
    )


@pytest.mark.parametrize(
    ("allowed", "threads"), [("0-3", 4), ("4-7,12-15", 4), ("12", 1), ("1,9", 1)]
)
def test_processors_of_one_node_need_no_choice(
    machine: Machine, allowed: str, threads: int
) -> None:
    """A cpuset, numactl or taskset has chosen: nothing is bound, nothing is said."""
    machine.allow(allowed)
    assert machine.place() == Placement(threads)


def test_nodes_of_memory_alone_are_none_to_choose(machine: Machine) -> None:
    machine.nodes({0: "0-15", 1: "", 2: ""})
    assert machine.place() == Placement(8)
    with pytest.raises(ConfigError, match=r"--numa 1 is no NUMA node.* has 0 \(CPUs 0-15\)$"):
        machine.place(numa="1")


def test_a_machine_without_nodes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    for name in ("node0", "node1"):
        (tmp_path / "node" / name / "cpulist").unlink()
    assert machine.place() == machine.place(numa="off") == Placement(8)
    assert summary(machine.place(numa="0")) == (8, 0, "0-15")
    with pytest.raises(ConfigError, match=r"--numa 1 is no NUMA node"):
        machine.place(numa="1")
    # nor does the system tell which processors may be used
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.place() == Placement(6)
    assert machine.place(numa="0").threads == 6


@pytest.mark.parametrize(
    ("quota", "auto", "off"), [(2.5, 2, 2), (4, 4, 4), (6, 4, 6), (16, 4, 8), (0.5, 1, 1)]
)
def test_quotas_limit_threads_and_not_the_node(
    machine: Machine, quota: float, auto: int, off: int
) -> None:
    machine.quota(quota)
    assert summary(machine.place()) == (auto, 0, "0-3,8-11")
    assert machine.place().why.startswith(f"{_count(auto, 'thread')} on NUMA")
    assert machine.place(numa="off") == Placement(off)
    assert machine.place(numa="1").threads == auto


def test_off_is_all_nodes_unbound(machine: Machine) -> None:
    assert machine.place(numa="off") == Placement(8)
    assert machine.place(5, numa="off") == Placement(5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_by_its_number(machine: Machine, number: int) -> None:
    cpus = ("0-3,8-11", "4-7,12-15")[number]
    # nothing was left to choose, so there is nothing to explain
    expected = Placement(4, number, parse_cpus(cpus))
    assert machine.place(numa=str(number)) == expected
    # of which only some may be used
    machine.allow("2,3,6,12")
    usable = ("2-3", "6,12")[number]
    assert summary(machine.place(numa=str(number))) == (2, number, usable)


def test_threads_win(machine: Machine) -> None:
    for threads in (1, 4):
        assert summary(machine.place(threads)) == (threads, 0, "0-3,8-11")
    assert machine.place(3).why == (
        "3 threads on NUMA node 0 because it has 4 of the 8 cores that may be used"
    )
    assert machine.place(5) == Placement(
        5, why="5 threads, bound to none of 2 NUMA nodes because none has more than 4 cores"
    )
    # whoever says both means both
    assert summary(machine.place(5, numa="1")) == (5, 1, "4-7,12-15")
    machine.quota(2)
    assert machine.place(3).threads == 3


@pytest.mark.parametrize(
    "variable", ["OMP_PROC_BIND=true", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-3"]
)
def test_whoever_binds_threads_by_hand_is_left_alone(machine: Machine, variable: str) -> None:
    environ = dict([variable.split("=")])
    assert machine.place(environ=environ) == Placement(
        8, why=f"8 threads, bound to none of 2 NUMA nodes because {variable} binds threads"
    )
    assert machine.place(numa="off", environ=environ) == Placement(8)
    with pytest.raises(ConfigError, match=f"--numa 1 and {variable} both bind threads"):
        machine.place(numa="1", environ=environ)
    # on one node there was nothing to bind
    machine.allow("0-3")
    assert machine.place(environ=environ) == Placement(4)


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_PROC_BIND": "False"},
        {"OMP_PLACES": ""},
        {"OMP_NUM_THREADS": "3"},
        {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"},
    ],
)
def test_variables_that_bind_nothing(machine: Machine, environ: dict[str, str]) -> None:
    assert machine.place(environ=environ).node == 0


@pytest.mark.parametrize(
    ("allowed", "numa", "words"),
    [
        (
            "0-15",
            "7",
            r"--numa 7 is no NUMA node with processors; this machine has 0 \(CPUs 0-3,8-11\), "
            r"1 \(CPUs 4-7,12-15\)",
        ),
        (
            "0-2,8",
            "1",
            r"--numa 1 leaves no processor: the node has CPUs 4-7,12-15, and this process may use "
            "0-2,8",
        ),
        ("0-15", "-1", "numa must be auto, off or the number of a node, got '-1'"),
        ("0-15", "all", "got 'all'"),
        ("0-15", "²", "got '²'"),
    ],
)
def test_nodes_that_cannot_be(machine: Machine, allowed: str, numa: str, words: str) -> None:
    machine.allow(allowed)
    with pytest.raises(ConfigError, match=words):
        machine.place(numa=numa)


@pytest.mark.parametrize("numa", ["auto", "off", "0"])
def test_no_threads_are_refused(machine: Machine, numa: str) -> None:
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        machine.place(0, numa=numa)
