"""Sizing from files that describe machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.backends.machine.cpu import (
    available_memory,
    choose_num_blocks,
    choose_threads,
    may_have_cuda,
    multiplies_bfloat16,
    swap_seconds,
)
from paceline.backends.torch.machine import choose_dtype
from paceline.errors import ConfigError
from tests.backends.machines import write

MIB = 2**20


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    text = "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8192 kB\n"
    return write(tmp_path, {"meminfo": text}) / "meminfo"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * MIB),
        ({"memory.max": "max\n", "memory.current": "100\n"}, 8 * MIB),
        ({"memory.max": f"{5 * MIB}\n", "memory.current": f"{2 * MIB}\n"}, 3 * MIB),
        (
            {
                "memory.max": f"{5 * MIB}",
                "memory.current": f"{2 * MIB}",
                "memory.stat": f"anon 7\ninactive_file {MIB}\n",
            },
            4 * MIB,
        ),
        ({"memory.max": f"{50 * MIB}", "memory.current": f"{MIB}"}, 8 * MIB),
        ({"memory.max": f"{MIB}", "memory.current": f"{2 * MIB}"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": f"{6 * MIB}",
                "memory/memory.usage_in_bytes": f"{4 * MIB}",
            },
            2 * MIB,
        ),
    ],
)
def test_available_memory(
    files: dict[str, str], expected: int, meminfo: Path, tmp_path: Path
) -> None:
    cgroup = write(tmp_path / "cgroup", files)
    assert available_memory(cgroup=cgroup, meminfo=meminfo) == expected


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1001, 1002, 1003, 1004}, raising=False)
    assert choose_threads(None, cgroup=tmp_path) == 4
    assert choose_threads(3, cgroup=tmp_path) == 3
    for quota, expected in (("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        write(tmp_path, {"cpu.max": quota})
        assert choose_threads(None, cgroup=tmp_path) == expected
    old = write(tmp_path / "v1", {"cpu/cpu.cfs_quota_us": "300000"})
    write(old, {"cpu/cpu.cfs_period_us": "100000"})
    assert choose_threads(None, cgroup=old) == 3
    write(old, {"cpu/cpu.cfs_quota_us": "-1"})
    assert choose_threads(None, cgroup=old) == 4


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        # a service's own group, as systemd makes it, below groups without limits
        ("0::/system.slice/a.service\n", {"system.slice/a.service": 3}, 3),
        # the limits of all above it count too
        ("0::/x/y\n", {"x": 2, "x/y": 5}, 2),
        ("0::/x/y\n", {"": 1, "x/y": 5}, 1),
        # its neighbours' do not
        ("0::/x/y\n", {"x/z": 1}, 7),
        # what a container without a namespace of its own says of the host
        ("0::/docker/abc\n", {"": 4}, 4),
        ("0::/../x\n", {"x": 1}, 7),
        ("4:cpu,cpuacct:/x/y\n5:memory:/x/y\n0::/\n", {"cpu/x": 3, "memory/x": 3}, 3),
        ("5:pids:/x\n", {"pids/x": 1}, 7),
        ("nonsense\n", {"": 6}, 6),
    ],
)
def test_limits_of_the_groups_that_the_process_is_in(
    membership: str,
    files: dict[str, int],
    expected: int,
    meminfo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many processors as MiB of memory; 7 and 8 without a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1001, 1008)), raising=False)
    listed = write(tmp_path, {"self": membership}) / "self"
    root = tmp_path / "cgroup"
    for folder, limit in files.items():
        if folder.startswith(("cpu", "memory", "pids")):
            limits = {
                "cpu.cfs_quota_us": f"{limit}00000",
                "cpu.cfs_period_us": "100000",
                "memory.limit_in_bytes": f"{(limit + 1) * MIB}",
                "memory.usage_in_bytes": f"{MIB}",
            }
        else:
            limits = {
                "cpu.max": f"{limit}00000 100000",
                "memory.max": f"{(limit + 1) * MIB}",
                "memory.current": f"{MIB}",
            }
        write(root / folder, limits)
    assert choose_threads(None, cgroup=root, membership=listed) == expected
    found = available_memory(cgroup=root, membership=listed, meminfo=meminfo)
    assert found == (8 if expected == 7 else expected) * MIB


def blocks(
    kv_cache_bytes: int | None,
    *,
    free_bytes: int = 80_000,
    max_num_seqs: int = 4,
    max_model_len: int = 100,
) -> int:
    return choose_num_blocks(
        kv_cache_bytes,
        block_bytes=1000,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        free_bytes=free_bytes,
        share=0.25,
    )


def test_num_blocks() -> None:
    assert blocks(5999) == 5
    # given bytes are taken at their word, even if fewer would do
    assert blocks(10**9) == 10**6
    # a quarter of 80,000 bytes, one block of it for padding; 4 requests of 7 blocks would use 28
    assert blocks(None) == 19
    assert blocks(None, max_num_seqs=2) == 14
    assert blocks(None, max_model_len=17) == 8
    with pytest.raises(ConfigError, match="25% of 0 MiB"):
        blocks(None, free_bytes=3000)


@pytest.mark.parametrize(
    "trace",
    [
        "dev/nvidiactl",
        "dev/dxg",
        "dev/kfd",
        "dev/nvhost-gpu",
        "dev/nvmap",
        "proc/driver/nvidia/x",
    ],
)
def test_traces_of_cuda(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folders = {"devices": tmp_path / "dev", "proc": tmp_path / "proc"}
    assert not may_have_cuda(**folders)
    write(tmp_path, {trace: ""})
    assert may_have_cuda(**folders)
    for hidden, expected in (("", False), ("-1", False), ("0", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert may_have_cuda(**folders) is expected


def test_swapping_is_measured_on_what_there_is() -> None:
    moved: list[int] = []
    assert swap_seconds(moved.append, 5, 1000) > 0
    assert swap_seconds(moved.append, 1000, 1000) > 0
    assert moved == [5, 5, 5, 8, 8, 8]
    assert swap_seconds(moved.append, 0, 1000) == 0.0
    assert len(moved) == 6
    # what was moved stays in memory: of large blocks a few have to do
    swap_seconds(moved.append, 1000, 900_000)
    swap_seconds(moved.append, 1000, 3 << 20)
    assert moved[6:] == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx512f avx512_bf16", True),
        ("fpu avx2 amx_bf16 amx_tile", True),
        ("fpu avx512f avx512_vnni", False),
        ("fpu avx512_bf16x", False),
    ],
)
def test_bfloat16_is_told_by_flags(flags: str, expected: bool, tmp_path: Path) -> None:
    text = f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n"
    assert multiplies_bfloat16(write(tmp_path, {"cpuinfo": text}) / "cpuinfo") is expected
    assert not multiplies_bfloat16(tmp_path / "nothing")


def test_bfloat16_is_told_as_torch_tells_it() -> None:
    assert multiplies_bfloat16() == (choose_dtype("auto", "cpu") == torch.bfloat16)
