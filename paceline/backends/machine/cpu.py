"""Resources of this machine: threads and memory, and the size of the KV pool that follows.

Container limits count: a process in a cgroup may use less than the machine has.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline.backends.machine.topology import CPUS, allowed_cpus, cores_of
from paceline.errors import ConfigError

__all__ = [
    "CGROUP",
    "CPU_SHARE",
    "MEMBERSHIP",
    "NO_TORCH",
    "available_memory",
    "choose_num_blocks",
    "choose_threads",
    "has_torch",
    "may_have_cuda",
    "multiplies_bfloat16",
    "num_cores",
    "processor_quota",
    "swap_seconds",
    "trim_heap",
    "within_quota",
]


def trim_heap() -> None:
    """Trim the heap, once a process has loaded what it keeps, or threads have ended. glibc would
    otherwise hold the memory of vocabulary texts, dequantised layers and module sources for later
    allocations, which do not come. Takes some milliseconds; does nothing under other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


CGROUP: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
NO_TORCH: Final = "PyTorch is not installed: pip install 'paceline[torch]'"
# share of the host's free memory for the KV pool
CPU_SHARE: Final = 0.25
# blocks moved to time one, and their approximate bytes, which stay allocated
_SWAPPED: Final = 8
_SWAPPED_BYTES: Final = 2 << 20


def has_torch() -> bool:
    """Return whether PyTorch is installed, found out without loading it."""
    return find_spec("torch") is not None


def may_have_cuda(*, devices: Path = Path("/dev"), proc: Path = Path("/proc")) -> bool:
    """Return whether PyTorch may find CUDA devices; to ask it takes a second and 200 MB to load.

    Looks for traces of the driver: native, under Windows (``dxg``) or on Jetson (``nvhost-gpu``,
    ``nvmap``); CUDA_VISIBLE_DEVICES may hide all devices. AMD's devices (``kfd``) are CUDA devices
    to PyTorch too.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    names = ("nvidiactl", "dxg", "kfd", "nvhost-gpu", "nvmap")
    traces = [*(devices / name for name in names), proc / "driver" / "nvidia"]
    return any(trace.exists() for trace in traces)


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether PyTorch chooses bfloat16 on this processor (``torch.machine``), found without
    loading it: AVX-512's products of bfloat16, or AMX's where the system permits their use."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_tile" in flags


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _own_groups(controller: str, cgroup: Path, membership: Path) -> list[Path]:
    """Return folders of this process's control groups, of version 2 and of ``controller``'s
    hierarchy in version 1, with all their parents: each one's limit applies."""
    roots = {"": cgroup, controller: cgroup / controller}
    groups = list(roots.values())
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        # number:controllers:path, without controllers in version 2
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        # a container may see its own group as the root, or a path that is not there
        parts = [part for part in path.split("/") if part]
        for name in names.split(","):
            if name in roots and ".." not in parts:
                groups += [roots[name].joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    return groups


def choose_threads(
    wanted: int | None,
    *,
    cpus: Path = CPUS,
    cgroup: Path = CGROUP,
    membership: Path = MEMBERSHIP,
) -> int:
    """Return ``wanted``, or the physical cores that affinity and the cgroups' quotas leave on all
    NUMA nodes together, at least 1. ``placement`` is for an engine, which keeps to one socket.

    A second hardware thread of a core shares its vector units, so it adds nothing to a product.
    """
    if wanted is not None:
        if wanted < 1:
            raise ConfigError(f"threads must be at least 1, got {wanted}")
        return wanted
    return within_quota(num_cores(cpus=cpus), cgroup=cgroup, membership=membership)


def num_cores(*, cpus: Path = CPUS) -> int:
    """Physical cores that this process's affinity leaves, at least 1."""
    allowed = allowed_cpus()
    if allowed is None:
        return max(1, os.cpu_count() or 1)
    return max(1, len(cores_of(allowed, root=cpus)))


def processor_quota(*, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> float:
    """Return the processors that the cgroups let this process use on average, such as 1.5; infinity
    without a limit."""
    least = math.inf
    for group in _own_groups("cpu", cgroup, membership):
        quota = _read_words(group / "cpu.max")
        if len(quota) != 2:
            limit = _read_words(group / "cpu.cfs_quota_us")
            quota = limit + _read_words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
            least = min(least, int(quota[0]) / int(quota[1]))
    return least


def within_quota(threads: int, *, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return ``threads``, or as many as the cgroups' quotas keep busy all the time; at least 1.

    One thread more would exhaust a period's quota before its end, and all threads would stop until
    the next period. The rest of a quota such as 1.5 is left to the server's other process.
    """
    quota = processor_quota(cgroup=cgroup, membership=membership)
    return max(1, threads if quota >= threads else int(quota))


def available_memory(
    *,
    cgroup: Path = CGROUP,
    membership: Path = MEMBERSHIP,
    meminfo: Path = Path("/proc/meminfo"),
) -> int:
    """Bytes this process could still allocate on the host: free memory of the machine, or what
    its cgroups' limits leave, whichever is least. Reclaimable page cache counts as free."""
    words = _read_words(meminfo)
    if "MemAvailable:" in words:
        least = int(words[words.index("MemAvailable:") + 1]) * 1024
    else:
        least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for group in _own_groups("memory", cgroup, membership):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_words(group / limit_file), _read_words(group / used_file)
            if limit and used and limit[0].isdigit() and used[0].isdigit():
                stat = _read_words(group / "memory.stat")
                cached = int(stat[stat.index(cache_key) + 1]) if cache_key in stat else 0
                least = min(least, int(limit[0]) - int(used[0]) + cached)
    return max(0, least)


def choose_num_blocks(
    kv_cache_bytes: int | None,
    *,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    share: float,
) -> int:
    """Return the number of blocks in the KV pool.

    ``kv_cache_bytes`` is an upper bound when given. Otherwise the pool takes ``share`` of
    ``free_bytes``, at most what ``max_num_seqs`` requests of ``max_model_len`` tokens can use.

    Raises:
        ConfigError: not even one block fits.
    """
    # the pool has one block in addition to those it offers: the padding of TorchAttention
    if kv_cache_bytes is not None:
        blocks = kv_cache_bytes // block_bytes
        source = f"kv_cache_bytes={kv_cache_bytes}"
    else:
        useful = max_num_seqs * -(-max_model_len // block_size)
        blocks = min(int(free_bytes * share) // block_bytes - 1, useful)
        source = f"{share:.0%} of {free_bytes / 2**20:.0f} MiB of free memory"
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for a block: one of {block_size} tokens takes {block_bytes} "
            f"bytes, and there are {source}"
        )
    return blocks


def swap_seconds(move: Callable[[int], object], num_blocks: int, block_bytes: int) -> float:
    """Return the measured seconds of moving one block; 0.0 without blocks. ``move(count)`` moves
    that many and returns when they have arrived."""
    count = min(num_blocks, _SWAPPED, max(1, _SWAPPED_BYTES // block_bytes))
    if count < 1:
        return 0.0
    seconds = math.inf
    # the first pass allocates memory
    for _ in range(3):
        started = time.perf_counter()
        move(count)
        seconds = min(seconds, (time.perf_counter() - started) / count)
    return seconds
