"""Processors with cores of several speeds, as Linux describes them, in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backends.machine.placement import Placement, quick_cores
from paceline.backends.machine.topology import core_speeds, format_list, parse_list
from tests.backends.machines import Machine


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A laptop: four performance cores of two threads, CPUs 0-7, four efficiency cores, 8-11."""
    made = Machine(tmp_path, monkeypatch)
    made.nodes({0: "0-11", 1: ""})
    made.cores("0-1", "2-3", "4-5", "6-7", "8", "9", "10", "11")
    made.allow("0-11")
    made.speeds("cpufreq/cpuinfo_max_freq", {"0-3": 5_200_000, "4-7": 5_000_000, "8-11": 3_900_000})
    made.atoms("8-11")
    return made


def test_a_thread_for_each_performance_core(hybrid: Machine) -> None:
    placement = hybrid.place()
    why = "4 threads on the 4 quicker ones of 8 cores, CPUs 0-7"
    assert placement == Placement(4, cpus=parse_list("0-7"), why=why)
    assert placement.describe(None) == why
    # as far as this process may use them
    hybrid.allow("0,2-3,9-11")
    assert hybrid.place().cpus == parse_list("0,2-3")
    hybrid.allow("0-4,9")
    assert hybrid.place() == Placement(
        3, cpus=parse_list("0-4"), why="3 threads on the 3 quicker ones of 4 cores, CPUs 0-4"
    )


def test_threads_are_obeyed(hybrid: Machine) -> None:
    assert hybrid.place(2).cpus == parse_list("0-7")
    assert hybrid.place(8) == Placement(
        8,
        why="8 threads, bound to no cores because they are more than the 4 quicker ones of 8 cores",
    )
    assert hybrid.place(numa="off") == Placement(8)


def test_quotas_and_binders(hybrid: Machine) -> None:
    hybrid.quota(2.5)
    assert hybrid.place().why == (
        "2 threads on the 4 quicker ones of 8 cores, CPUs 0-7, no more because a control group "
        "allows 2.5 processors"
    )
    hybrid.quota(8)
    assert hybrid.place(environ={"OMP_PLACES": "cores"}) == Placement(
        4,
        why="4 threads for the 4 quicker ones of 8 cores, unbound because OMP_PLACES=cores binds "
        "threads",
    )


def test_what_the_kernel_measured_comes_before_the_clock(hybrid: Machine) -> None:
    """ARM's big.LITTLE, of which the little ones have the higher clock here."""
    hybrid.atoms("")
    hybrid.speeds("cpu_capacity", {"0-7": 400, "8-11": 1024})
    assert hybrid.place().cpus == parse_list("8-11")
    # alike: nothing is known by it
    hybrid.speeds("cpu_capacity", {"0-11": 1024})
    assert hybrid.place() == Placement(8), "3.9 GHz of 5.2 are three quarters, and twice as many"


def test_cores_that_are_alike_or_unknown_are_all_taken(hybrid: Machine) -> None:
    hybrid.atoms("")
    hybrid.speeds("cpufreq/cpuinfo_max_freq", {"0-11": 5_000_000})
    assert hybrid.place() == Placement(8)
    # of one of them nothing is said
    hybrid.speeds("cpufreq/cpuinfo_max_freq", {"8-10": 1_000_000})
    (hybrid.root / "cpu/cpu11/cpufreq/cpuinfo_max_freq").unlink()
    assert hybrid.place() == Placement(8)
    # nor in a list that cannot be read
    hybrid.atoms("8-x")
    assert hybrid.place() == Placement(8)


def test_speeds(hybrid: Machine) -> None:
    found = core_speeds(parse_list("1-5,8"), root=hybrid.root / "cpu", atoms=hybrid.root / "atoms")
    assert {name: (speed, format_list(cpus)) for name, (speed, cpus) in found.items()} == {
        "0-1": (1.0, "1"),
        "2-3": (1.0, "2-3"),
        "4-5": (pytest.approx(5.0 / 5.2), "4-5"),
        "8": (pytest.approx(3.9 / 5.2 / 2), "8"),
    }
    assert core_speeds((), root=hybrid.root / "cpu") == {}


@pytest.mark.parametrize(
    ("speeds", "taken"),
    [
        # 8 + 16 of Raptor Lake, 8 + 16 of Arrow Lake, 6 + 8, 4 + 8
        ([1.0] * 8 + [0.38] * 16, 8),
        ([1.0] * 8 + [0.40] * 16, 8),
        ([1.0] * 6 + [0.38] * 8, 6),
        ([1.0] * 4 + [0.38] * 8, 4),
        # 2 + 8: ten at a third are more than two
        ([1.0] * 2 + [0.38] * 8, 10),
        # two that clock higher than the others of their kind
        ([1.0] * 2 + [0.96] * 6 + [0.38] * 8, 8),
        # AMD's dense cores: the same but for the clock
        ([1.0] * 2 + [0.71] * 4, 6),
        ([1.0] * 4 + [0.71] * 8, 12),
        # a phone: one, three and four
        ([1.0] + [0.83] * 3 + [0.3] * 4, 4),
        ([1.0], 1),
        ([], 0),
    ],
)
def test_how_many_cores_are_quickest_together(speeds: list[float], taken: int) -> None:
    names = {f"core{number}": speed for number, speed in enumerate(speeds)}
    assert quick_cores(names) == frozenset(list(names)[:taken])
