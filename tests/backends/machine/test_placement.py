"""Threads and nodes, chosen on machines that are described in folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.backends.machine.placement import Placement, _count
from paceline.backends.machine.topology import format_list, parse_list
from paceline.errors import ConfigError
from tests.backends.machines import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def nps4(machine: Machine) -> Machine:
    """Two sockets of four nodes of two cores of two threads: node n has CPUs 2n, 2n + 1, 2n + 16
    and 2n + 17, CPU n + 16 is of the same core as CPU n, and nodes 4-7 are of socket 1."""
    machine.nodes({n: f"{2 * n}-{2 * n + 1},{2 * n + 16}-{2 * n + 17}" for n in range(8)})
    machine.cores(*(f"{cpu},{cpu + 16}" for cpu in range(16)))
    machine.packages({"0-7,16-23": 0, "8-15,24-31": 1})
    machine.allow("0-31")
    return machine


def summary(placement: Placement) -> tuple[int, str, str | None]:
    cpus = placement.cpus
    return placement.threads, placement.nodes, None if cpus is None else format_list(cpus)


@pytest.mark.parametrize(
    ("allowed", "threads", "node", "cpus"),
    [
        # a tie, of which nothing is known: the first
        ("0-15", 4, "0", "0-3,8-11"),
        # three cores of node 0, four of node 1
        ("0-2,4-7", 4, "1", "4-7"),
        # more processors on node 0, but of fewer cores
        ("0-1,8-9,4-6", 3, "1", "4-6"),
        # one core of node 0 is there with one of its threads
        ("0-3,8-10,4,12", 4, "0", "0-3,8-10"),
    ],
)
@pytest.mark.parametrize("packages", [{}, {"0-15": -1}, {"0-3,8-11": 1, "4-7,12-15": 0}])
def test_auto_takes_the_node_with_most_cores(
    machine: Machine,
    packages: dict[str, int],
    allowed: str,
    threads: int,
    node: str,
    cpus: str,
) -> None:
    """Where a socket is a node, or the kernel does not tell which are of one."""
    machine.packages(packages)
    machine.allow(allowed)
    assert summary(machine.place()) == (threads, node, cpus)


@pytest.mark.parametrize(
    ("allowed", "threads", "nodes", "cpus", "why"),
    [
        (
            "0-31",
            8,
            "0-3",
            "0-7,16-23",
            "8 threads on NUMA nodes 0-3 because they have 8 of the 16 cores that may be used",
        ),
        # a core each of nodes 0, 2 and 3, and two of one of the other socket's
        (
            "1,4,6,8-9",
            3,
            "0,2-3",
            "1,4,6",
            "3 threads on NUMA nodes 0,2-3 because they have 3 of the 5 cores that may be used",
        ),
        # what is left of socket 1 is one node, with as many processors but more cores
        (
            "0,16,8-9",
            2,
            "4",
            "8-9",
            "2 threads on NUMA node 4 because it has 2 of the 3 cores that may be used",
        ),
    ],
)
def test_auto_takes_all_nodes_of_a_socket(
    nps4: Machine, allowed: str, threads: int, nodes: str, cpus: str, why: str
) -> None:
    nps4.allow(allowed)
    placement = nps4.place()
    assert summary(placement) == (threads, nodes, cpus)
    assert placement.why == why


def test_a_node_of_several_sockets_is_taken_alone(nps4: Machine) -> None:
    nps4.packages({"0": 1})
    assert summary(nps4.place()) == (8, "4-7", "8-15,24-31")
    nps4.allow("0-9")
    assert summary(nps4.place()) == (6, "1-3", "2-7")


def test_nodes_of_one_socket_are_no_choice(nps4: Machine) -> None:
    """All that may be used is taken, unbound, as where firmware shows the socket as one node."""
    nps4.allow("1-7,16-20")
    words = "bound to none of 4 NUMA nodes because they are of one socket"
    assert nps4.place() == Placement(8, why=f"8 threads, {words}")
    assert nps4.place(9) == Placement(9, why=f"9 threads, {words}")
    # unless nobody knows that they are of one
    nps4.packages({"0-31": -1})
    assert summary(nps4.place()) == (2, "0", "1,16-17")


def test_free_memory_of_a_socket_is_its_nodes_together(nps4: Machine) -> None:
    nps4.free([100, 0, 0, 0, 30, 30, 30, 30])
    assert nps4.place().nodes == "4-7"
    # of nodes that cannot be used it does not count
    nps4.allow("0-13")
    nps4.free([1, 1, 1, 1, 1, 1, 1, 900])
    assert nps4.place().nodes == "0-3"
    nps4.allow("0-5,8-13")
    assert nps4.place().nodes == "0-2"
    nps4.free([1, 1, 1, 900, 1, 1, 2])
    assert nps4.place().nodes == "4-6"


@pytest.mark.parametrize(
    ("free", "node"), [([100, 101], "1"), ([101, 100], "0"), ([100, 100], "0"), ([0, 1], "1")]
)
def test_ties_go_to_free_memory_then_to_the_lowest_number(
    machine: Machine, free: list[int], node: str
) -> None:
    machine.free(free)
    assert machine.place().nodes == node
    # more cores count more than more memory
    machine.allow("0-2,4-7")
    assert machine.place().nodes == "1"


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
    with pytest.raises(ConfigError, match=r"--numa 1: no NUMA node.* has node 0 \(CPUs 0-15\)$"):
        machine.place(numa="1")


def test_a_machine_without_nodes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    for name in ("node0", "node1"):
        (tmp_path / "node" / name / "cpulist").unlink()
    assert machine.place() == machine.place(numa="off") == Placement(8)
    assert summary(machine.place(numa="0")) == (8, "0", "0-15")
    with pytest.raises(ConfigError, match=r"--numa 1: no NUMA node"):
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
    assert summary(machine.place()) == (auto, "0", "0-3,8-11")
    assert machine.place().why.startswith(f"{_count(auto, 'thread')} on NUMA")
    assert summary(machine.place(numa="off")) == (off, "", None)
    assert machine.place(numa="1").threads == auto


@pytest.mark.parametrize("version", [1, 2])
def test_why_a_quota_leaves_so_few_threads(machine: Machine, version: int) -> None:
    """A container's 1.5 processors: a second thread would stop both before the end of a period."""
    machine.allow("0-3")
    machine.quota(1.5, version)
    why = "1 thread, no more because a control group allows 1.5 processors"
    assert machine.place() == Placement(1, why=why)
    assert machine.place().describe(None) == why
    assert machine.place(numa="off") == Placement(1, why=why)
    # whoever wants more is told what that does
    why = "2 threads, which a control group that allows 1.5 processors will stop now and then"
    assert machine.place(2) == Placement(2, why=why)
    assert machine.place(2).describe(2) == why
    assert machine.place(1) == Placement(1)
    # less than one cannot be had
    machine.quota(0.5, version)
    why = "1 thread, no more because a control group allows 0.5 processors"
    assert machine.place() == Placement(1, why=why)
    # nor is it said where the cores are fewer
    machine.quota(4, version)
    assert machine.place() == Placement(4)


def test_a_quota_beside_nodes(machine: Machine) -> None:
    machine.quota(2.5)
    assert machine.place().why == (
        "2 threads on NUMA node 0 because it has 4 of the 8 cores that may be used, no more "
        "because a control group allows 2.5 processors"
    )


def test_off_is_all_sockets_unbound(nps4: Machine) -> None:
    assert nps4.place(numa="off") == Placement(16)


def test_quotas_limit_the_threads_of_several_nodes(nps4: Machine) -> None:
    nps4.quota(5)
    assert summary(nps4.place()) == (5, "0-3", "0-7,16-23")
    assert nps4.place(numa="0-1").threads == 4
    assert nps4.place(numa="0,2,5").threads == 5


def test_off_is_all_nodes_unbound(machine: Machine) -> None:
    assert machine.place(numa="off") == Placement(8)
    assert machine.place(5, numa="off") == Placement(5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_by_its_number(machine: Machine, number: int) -> None:
    cpus = ("0-3,8-11", "4-7,12-15")[number]
    # nothing was left to choose, so there is nothing to explain
    expected = Placement(4, str(number), parse_list(cpus))
    assert machine.place(numa=str(number)) == expected
    # of which only some may be used
    machine.allow("2,3,6,12")
    usable = ("2-3", "6,12")[number]
    assert summary(machine.place(numa=str(number))) == (2, str(number), usable)


@pytest.mark.parametrize(
    ("numa", "threads", "nodes", "cpus"),
    [
        ("0-1", 4, "0-1", "0-3,16-19"),
        ("5,0,2", 6, "0,2,5", "0-1,4-5,10-11,16-17,20-21,26-27"),
        ("6-7,7", 4, "6-7", "12-15,28-31"),
        # of both sockets, and all there is: whoever says so means it
        ("0-7", 16, "0-7", "0-31"),
    ],
)
def test_nodes_by_their_numbers(
    nps4: Machine, numa: str, threads: int, nodes: str, cpus: str
) -> None:
    assert nps4.place(numa=numa) == Placement(threads, nodes, parse_list(cpus))
    assert nps4.place(9, numa=numa) == Placement(9, nodes, parse_list(cpus))
    # of which only some may be used
    nps4.allow("0,2-10,12,14")
    usable = parse_list(cpus) & parse_list("0,2-10,12,14")
    assert nps4.place(numa=numa) == Placement(len(usable), nodes, usable)


def test_threads_win(machine: Machine) -> None:
    for threads in (1, 4):
        assert summary(machine.place(threads)) == (threads, "0", "0-3,8-11")
    assert machine.place(3).why == (
        "3 threads on NUMA node 0 because it has 4 of the 8 cores that may be used"
    )
    assert machine.place(5) == Placement(
        5, why="5 threads, bound to none of 2 NUMA nodes because none has more than 4 cores"
    )
    # whoever says both means both
    assert summary(machine.place(5, numa="1")) == (5, "1", "4-7,12-15")
    machine.quota(2)
    assert machine.place(3).threads == 3


def test_threads_win_over_several_nodes(nps4: Machine) -> None:
    assert summary(nps4.place(8)) == (8, "0-3", "0-7,16-23")
    assert nps4.place(9) == Placement(
        9, why="9 threads, bound to none of 8 NUMA nodes because no socket has more than 8 cores"
    )


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
    assert machine.place(environ=environ).nodes == "0"


@pytest.mark.parametrize(
    ("allowed", "numa", "words"),
    [
        (
            "0-15",
            "7",
            r"--numa 7: no NUMA node with processors is numbered 7; this machine has node 0 "
            r"\(CPUs 0-3,8-11\), node 1 \(CPUs 4-7,12-15\)$",
        ),
        (
            "0-15",
            "7,1-3,9",
            r"--numa 7,1-3,9: no NUMA node with processors is numbered 2-3,7,9; this machine has "
            r"node 0 ",
        ),
        (
            "0-2,8",
            "1",
            r"--numa 1 leaves no processor on node 1 \(CPUs 4-7,12-15\): this process may use "
            "CPUs 0-2,8$",
        ),
        # as much of an error as 1 alone
        ("0-2,8", "0-1", r"--numa 0-1 leaves no processor on node 1 \(CPUs 4-7,12-15\): "),
        ("0-15", "-1", "numa must be auto, off or nodes such as 0 or 0-1,4, got '-1'"),
        ("0-15", "", "got ''"),
        ("0-15", "0,", "got '0,'"),
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
