"""The machine that ran a benchmark, for its JSON: one helper for all and ``paceline bench``.

The clock is measured: a chain of dependent additions, one a cycle, on one thread (the system often
reports a nominal figure, in virtual machines always). The bandwidth is that of all threads together
reading a buffer of 256 MiB. Both take well under a second, and are lower than the machine's own
while other work runs; ``load`` (the average of the last minute) shows that.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

__all__ = ["cpu_model", "cpu_name", "machine"]

_BUFFER: Final = 256 << 20


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's model name, from the text of /proc/cpuinfo; else the architecture."""
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def cpu_model(cpuinfo: str) -> str | None:
    """Return family, model and stepping, such as "26.2.1", which distinguish processors that
    hypervisors name alike; None if the text of /proc/cpuinfo has none."""
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    parts = [found.get(key) for key in ("cpu family", "model", "stepping")]
    return None if None in parts else ".".join(filter(None, parts))


def machine(cpus: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Measure processor, level of the native kernels, clock, bandwidth, memory and load.

    Args:
        cpus: the processors that the benchmark may use; None: those of this process.

    ``level``, ``clock_ghz`` and ``read_gb_s`` are None without the native library.
    """
    from paceline.backends.native import unavailable_reason, variants
    from paceline.backends.native.single_kernels import clock_hz, read_bandwidth

    load = round(os.getloadavg()[0], 2)
    threads = len(os.sched_getaffinity(0) if cpus is None else cpus)
    memory = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = int(line.split()[1]) // 1024
    there = unavailable_reason() is None
    cpuinfo = Path("/proc/cpuinfo").read_text()
    return {
        "cpu": cpu_name(cpuinfo),
        "model": cpu_model(cpuinfo),
        "level": variants()[0] if there else None,
        "clock_ghz": round(clock_hz() / 1e9, 2) if there else None,
        "read_gb_s": round(read_bandwidth(_BUFFER, threads) / 1e9, 1) if there else None,
        "cores": threads,
        "memory_mb": memory,
        "python": platform.python_version(),
        "load": load,
    }
