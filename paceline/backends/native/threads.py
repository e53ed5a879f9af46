"""How many threads this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_cpus"]


def _quota(root: Path) -> float | None:
    """CPUs granted by the control group, version 2 or 1; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return limit / int((root / "cpu" / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that the affinity mask and the control group's quota leave, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return max(1, min(cpus, round(quota)) if quota is not None else cpus)
