"""What the kernel says of processors and nodes, read from folders."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.machine.topology import (
    Node,
    allowed_cpus,
    bind,
    cores_of,
    format_list,
    parse_list,
    read_nodes,
    sockets_of,
)
from tests.backends.machines import Machine, write


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("7", {7}),
        ("5-5", {5}),
        ("\n", set()),
        ("", set()),
        # ranges may touch
        ("0-1,1-2", {0, 1, 2}),
    ],
)
def test_lists_of_numbers(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


@pytest.mark.parametrize(
    "text", ["x", "1-", "-1", "3-1", "1,,2", "0 1", "0-7:2/4", "1,", "٣", "0-100000"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a number nor a range"):
        parse_list(text)


def test_lists_are_written_as_the_kernel_does() -> None:
    assert format_list({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert format_list(()) == ""


@given(st.sets(st.integers(0, 300)))
def test_writing_is_the_inverse_of_reading(numbers: set[int]) -> None:
    assert parse_list(format_list(numbers)) == numbers


def test_nodes_with_processors(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    machine.free([700, 300])
    # memory alone, as CXL and HBM are; garbage; a number that sorts behind 2 only as a number
    machine.nodes({2: "", 3: "0-x", 10: "16"})
    write(tmp_path, {"node/node4/meminfo": "Node 4 MemFree: 5 kB\n"})
    assert read_nodes(root=tmp_path / "node") == (
        Node(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11}), 700 * 1024),
        Node(1, frozenset({4, 5, 6, 7, 12, 13, 14, 15}), 300 * 1024),
        Node(10, frozenset({16}), 0),
    )


def test_a_kernel_without_nodes(tmp_path: Path) -> None:
    assert read_nodes(root=tmp_path / "nothing") == ()


def test_cores(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    assert len(cores_of(range(16), root=tmp_path / "cpu")) == 8
    # both threads of one core, and one of another
    assert len(cores_of({0, 8, 9}, root=tmp_path / "cpu")) == 2
    # of which nothing is known
    assert len(cores_of({0, 8, 77, 78}, root=tmp_path / "cpu")) == 3
    machine.cores("77-78")
    assert len(cores_of({0, 8, 77, 78}, root=tmp_path / "cpu")) == 2


def test_sockets(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    machine.nodes({number: f"{2 * number}-{2 * number + 1}" for number in range(7)})

    def sockets() -> list[list[int]]:
        found = sockets_of(read_nodes(root=tmp_path / "node"), root=tmp_path / "cpu")
        return [[node.number for node in socket] for socket in found]

    # of which nothing is known
    assert sockets() == [[0], [1], [2], [3], [4], [5], [6]]
    # two sockets that take turns, of which the names say nothing; -1 is how the kernel says unknown
    machine.packages({"0-1,4-5": 36, "2-3,6-7": 0, "8-11": -1})
    assert sockets() == [[0, 2], [1, 3], [4], [5], [6]]
    # node 5 is of two sockets, and node 6 perhaps, although both are of one with node 0
    machine.packages({"10": 36, "11": 0, "12": 36})
    assert sockets() == [[0, 2], [1, 3], [4], [5], [6]]


def test_this_machine_describes_itself() -> None:
    allowed = allowed_cpus()
    if allowed is None:
        pytest.skip("this system does not tell which processors may be used")
    assert allowed == os.sched_getaffinity(0)
    assert 1 <= len(cores_of(allowed)) <= len(allowed)
    nodes = read_nodes()
    if nodes:
        assert allowed <= frozenset().union(*(node.cpus for node in nodes))
        assert sum(node.free_bytes for node in nodes) > 0


def test_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread of this test's own, which then starts another; the test's is left alone."""
    allowed = allowed_cpus()
    if allowed is None or len(allowed) < 2:
        pytest.skip("needs two processors")
    one = frozenset({max(allowed)})
    seen: list[object] = []

    def child() -> None:
        seen.append(os.sched_getaffinity(0))

    def bound() -> None:
        seen.append(bind(one, whole_process=False))
        child()
        later = threading.Thread(target=child)
        later.start()
        later.join()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == ["", one, one]
    assert os.sched_getaffinity(0) == allowed


def test_binding_a_process_reaches_threads_that_appear_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    write(tmp_path, {"11": "", "12": "", "13": ""})

    def set_affinity(task: int, cpus: frozenset[int]) -> None:
        assert cpus == {5}
        done.append(task)
        if task == 12:
            raise ProcessLookupError(3, "No such process")
        if task == 13 and len(done) < 5:
            write(tmp_path, {"14": ""})

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity, raising=False)
    assert bind(frozenset({5}), whole_process=True, tasks=tmp_path) == ""
    assert done[0] == 0
    assert sorted(done) == [0, 11, 12, 13, 14]
    assert bind(frozenset({5}), whole_process=False, tasks=tmp_path) == ""
    assert len(done) == 6


def test_binding_a_process_whose_threads_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc is not mounted: the threads that compute are started by the calling one."""
    done: list[int] = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda task, cpus: done.append(task), raising=False
    )
    assert bind(frozenset({5}), whole_process=True, tasks=tmp_path / "nothing") == ""
    assert done == [0]


def test_where_nothing_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_task: int, _cpus: frozenset[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    assert "Operation not permitted" in bind(frozenset({5}), whole_process=True)
    monkeypatch.delattr(os, "sched_setaffinity")
    assert bind(frozenset({5}), whole_process=True) == "this system binds no processes"
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert allowed_cpus() is None
