"""What this machine offers: device, dtype, processors, memory, and the KV pool that follows.

Container limits count: a process in a cgroup may use less than the machine has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from paceline.core.errors import ConfigError

__all__ = [
    "available_memory",
    "choose_device",
    "choose_dtype",
    "choose_num_blocks",
    "choose_threads",
]

_CPU_SHARE: Final = 0.25
_CUDA_SHARE: Final = 0.9
_CGROUP: Final = Path("/sys/fs/cgroup")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises ConfigError for what is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if not torch.cuda.is_available() or index >= count:
            raise ConfigError(
                f"device {name!r} was asked for, but PyTorch {torch.__version__} sees {count} "
                "CUDA devices here: use --device cpu, or install a CUDA build of PyTorch"
            )
        return torch.device("cuda", index)
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware computes with it, else float32."""
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"dtype {name!r} is not supported: use auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def choose_threads(wanted: int | None, *, cgroup: Path = _CGROUP) -> int:
    """Physical cores that affinity and the cgroup's quota leave, at least 1; ``wanted`` wins.

    A second hardware thread of a core shares its vector units, so it adds nothing to a product.
    """
    if wanted is not None:
        if wanted < 1:
            raise ConfigError(f"threads must be at least 1, got {wanted}")
        return wanted
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        siblings = _read_words(
            Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        )
        cores.add(siblings[0] if siblings else str(cpu))
    count = len(cores)
    quota = _read_words(cgroup / "cpu.max")
    if len(quota) != 2:
        limit = _read_words(cgroup / "cpu" / "cpu.cfs_quota_us")
        quota = limit + _read_words(cgroup / "cpu" / "cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        count = min(count, int(quota[0]) // int(quota[1]))
    return max(1, count)


def available_memory(*, cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes this process could still allocate on the host: free memory of the machine, or what
    the cgroup's limit leaves, whichever is less. Reclaimable page cache counts as free."""
    words = _read_words(meminfo)
    if "MemAvailable:" in words:
        machine = int(words[words.index("MemAvailable:") + 1]) * 1024
    else:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit_file, used_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _read_words(cgroup / limit_file), _read_words(cgroup / used_file)
        if limit and used and limit[0].isdigit() and used[0].isdigit():
            stat = _read_words(cgroup / stat_file)
            cached = int(stat[stat.index(cache_key) + 1]) if cache_key in stat else 0
            return max(0, min(machine, int(limit[0]) - int(used[0]) + cached))
    return machine


def choose_num_blocks(
    kv_cache_bytes: int | None,
    *,
    block_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Blocks in the KV pool.

    ``kv_cache_bytes`` is an upper bound when given. Otherwise a quarter of the host's available
    memory on the CPU, nine tenths of what is free on CUDA, but no more than ``max_num_seqs``
    requests of ``max_model_len`` tokens can use. The weights are loaded by then.

    Raises:
        ConfigError: not even one block fits.
    """
    # the pool holds one more block than it offers: the padding of TorchAttention
    if kv_cache_bytes is not None:
        blocks = kv_cache_bytes // block_bytes
        source = f"kv_cache_bytes={kv_cache_bytes}"
    else:
        if device.type == "cuda":
            free, share = torch.cuda.mem_get_info(device)[0], _CUDA_SHARE
        else:
            free, share = available_memory(), _CPU_SHARE
        useful = max_num_seqs * -(-max_model_len // block_size)
        blocks = min(int(free * share) // block_bytes - 1, useful)
        source = f"{share:.0%} of {free / 2**20:.0f} MiB of free memory"
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for a block: one of {block_size} tokens takes {block_bytes} "
            f"bytes, and there are {source}"
        )
    return blocks
