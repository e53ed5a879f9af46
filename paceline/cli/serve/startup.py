"""Durations of the parts of a start, which a server's two processes log."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

__all__ = ["Stages", "process_age"]

_IMPORTED = time.monotonic()


def process_age(*, stat: Path = Path("/proc/self/stat")) -> float:
    """Return the seconds since this process was started, to a hundredth; where the system does not
    report them, since this module was imported."""
    try:
        # the name before it, in parentheses, may contain any character
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Stages:
    """Parts of a process's start, one after another.

    Args:
        age: seconds since the process's start; they count for the first part.
        now: the time of ``time.monotonic()``.
    """

    def __init__(self, age: float, now: float) -> None:
        self._started = now - age
        self._last = self._started
        self._parts: dict[str, float] = {}

    def done(self, name: str, now: float) -> None:
        """Record the time from the previous part's end to ``now`` as ``name``."""
        self._parts[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Return the seconds from the process's start to the end of the last part."""
        return self._last - self._started

    def log(self, logger: logging.Logger, event: str) -> None:
        """Log a line with the total and each part, as separate fields in JSON logs."""
        fields = {"total": self.total, **self._parts}
        names = " ".join(f"{name}=%.2f" for name in fields)
        logger.info(f"{event} {names}", *fields.values())
