"""Machines as Linux describes them, in folders of a test's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.backends.machine.placement import Placement, choose_placement
from paceline.backends.machine.topology import parse_list

__all__ = ["Machine", "write"]


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Machine:
    """Two nodes of four cores of two threads: node 0 has CPUs 0-3 and 8-11, node 1 has 4-7 and
    12-15, and CPU n + 8 is of the same core as CPU n. This process may use all of them.

    Args:
        monkeypatch: None: this process's affinity stays what it is.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch | None) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        self.nodes({0: "0-3,8-11", 1: "4-7,12-15"})
        self.cores(*(f"{cpu},{cpu + 8}" for cpu in range(8)))
        self.allow("0-15")

    def nodes(self, cpulists: Mapping[int, str]) -> None:
        write(self.root, {f"node/node{n}/cpulist": f"{cpus}\n" for n, cpus in cpulists.items()})
        # what else lies there
        write(self.root, {"node/possible": "0-1\n", "node/power/control": "auto\n"})

    def free(self, kilobytes: Sequence[int]) -> None:
        for number, size in enumerate(kilobytes):
            lines = (f"MemTotal:  9000 kB\nNode {number} MemFree:  {size}", "MemUsed:  1")
            text = "".join(f"Node {number} {line} kB\n" for line in lines)
            write(self.root, {f"node/node{number}/meminfo": text})

    def cores(self, *cpulists: str) -> None:
        for siblings in cpulists:
            for cpu in parse_list(siblings):
                name = f"cpu/cpu{cpu}/topology/thread_siblings_list"
                write(self.root, {name: f"{siblings}\n"})

    def packages(self, numbers: Mapping[str, int]) -> None:
        """Physical packages, by lists of their CPUs; without it they are unknown."""
        for cpulist, package in numbers.items():
            for cpu in parse_list(cpulist):
                name = f"cpu/cpu{cpu}/topology/physical_package_id"
                write(self.root, {name: f"{package}\n"})

    def allow(self, cpus: str) -> None:
        if self._monkeypatch is not None:
            self._monkeypatch.setattr(
                "os.sched_getaffinity", lambda _: set(parse_list(cpus)), raising=False
            )

    def speeds(self, file: str, numbers: Mapping[str, int]) -> None:
        """What the kernel says of CPUs in a file of each, by lists of them."""
        for cpulist, number in numbers.items():
            for cpu in parse_list(cpulist):
                write(self.root, {f"cpu/cpu{cpu}/{file}": f"{number}\n"})

    def atoms(self, cpulist: str) -> None:
        write(self.root, {"atoms": f"{cpulist}\n"})

    def quota(self, cpus: float, version: int = 2) -> None:
        quota, period = str(int(cpus * 100_000)), "100000"
        if version == 1:
            files = {"cfs_quota_us": quota, "cfs_period_us": period}
            write(self.root, {f"cgroup/cpu/cpu.{name}": text for name, text in files.items()})
        else:
            write(self.root, {"cgroup/cpu.max": f"{quota} {period}\n"})

    def place(
        self, threads: int | None = None, numa: str = "auto", environ: Mapping[str, str] = {}
    ) -> Placement:
        return choose_placement(
            threads,
            numa,
            cpus=self.root / "cpu",
            nodes=self.root / "node",
            atoms=self.root / "atoms",
            cgroup=self.root / "cgroup",
            membership=self.root / "membership",
            environ=environ,
        )
