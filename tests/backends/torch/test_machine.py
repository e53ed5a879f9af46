"""Sizing from files that describe machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.backends.torch import machine
from paceline.backends.torch.machine import (
    available_memory,
    choose_device,
    choose_dtype,
    choose_num_blocks,
    choose_threads,
)
from paceline.core.errors import ConfigError

MIB = 2**20
CPU = torch.device("cpu")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


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


def blocks(kv_cache_bytes: int | None, max_num_seqs: int = 4, max_model_len: int = 100) -> int:
    return choose_num_blocks(
        kv_cache_bytes,
        block_bytes=1000,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=CPU,
    )


def test_num_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(5999) == 5
    # given bytes are taken at their word, even if fewer would do
    assert blocks(10**9) == 10**6
    monkeypatch.setattr(machine, "available_memory", lambda: 80_000)
    # a quarter of 80,000 bytes, one block of it for padding; 4 requests of 7 blocks would use 28
    assert blocks(None) == 19
    assert blocks(None, max_num_seqs=2) == 14
    assert blocks(None, max_model_len=17) == 8
    monkeypatch.setattr(machine, "available_memory", lambda: 3000)
    with pytest.raises(ConfigError, match="25% of 0 MiB"):
        blocks(None)


def test_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("float32", CPU) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16
    for avx512_bf16, amx, expected in (
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda v=avx512_bf16: v)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda v=amx: v)
        assert choose_dtype("auto", CPU) is expected


def test_device() -> None:
    assert choose_device("cpu") == CPU
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected
