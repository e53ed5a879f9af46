"""Detection of other processes on the engine's processors.

The threads of a step wait for one another hundreds of times in it. If another process takes one of
their processors, all of them wait for the thread that lost it, so the engine loses much more than
that share (docs/lab-log/, "Contended cores"). No other figure shows it: the machine looks busy
either way. This module reads the kernel's count of the time that each thread was ready but not
running (``schedstat``).

``ContentionMeter`` is pure; ``watch_contention`` reads and logs. Linux only: elsewhere, and without
the kernel's counts, it does nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Contention", "ContentionMeter", "Sample", "read_sample", "watch_contention"]

_log = logging.getLogger(__name__)

# seconds between two samples, and between two lines in the log while contention lasts
_LOOK: Final = 10.0
_AGAIN: Final = 60.0
# share of the time in which the engine wanted a processor and had none
_WAITED: Final = 0.25
# processors that other processes kept busy meanwhile
_OTHERS: Final = 0.5
# share of the time below which an engine that wants a processor has not much to lose
_BUSY: Final = 0.2
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters in seconds, from any start."""

    # time of the clock
    now: float
    # this process's threads: on a processor, and ready for one
    ran: float
    waited: float
    # the machine's processors: all busy time (or stolen by a hypervisor), and the part of it spent
    # by this process and its parent
    busy: float
    own: float


@dataclass(frozen=True, slots=True)
class Contention:
    """Contention between two samples."""

    # share of the time in which the engine wanted a processor and had none, 0 to 1
    waited: float
    # processors used by other processes, on average
    others: float


class ContentionMeter:
    """Compares samples."""

    def __init__(self) -> None:
        self._before: Sample | None = None
        self._said_at: float | None = None

    def look(self, sample: Sample) -> Contention | None:
        """Return the contention if it is too high and none was returned lately."""
        before, self._before = self._before, sample
        if before is None:
            return None
        seconds = sample.now - before.now
        ran, waited = sample.ran - before.ran, sample.waited - before.waited
        others = (sample.busy - before.busy) - (sample.own - before.own)
        # the counts of ended threads are gone
        if seconds <= 0 or min(ran, waited) < 0 or ran + waited < _BUSY * seconds:
            return None
        found = Contention(waited / (ran + waited), others / seconds)
        if found.waited < _WAITED or found.others < _OTHERS:
            return None
        if self._said_at is not None and sample.now - self._said_at < _AGAIN:
            return None
        self._said_at = sample.now
        return found


def read_sample(now: float, proc: Path = Path("/proc"), parent: int | None = None) -> Sample | None:
    """Read the present counters; None if the kernel has none.

    Args:
        parent: of this process; its own by default: the server, which is not a stranger.
    """
    try:
        ran = waited = 0
        for task in (proc / "self" / "task").iterdir():
            on, ready, _ = (task / "schedstat").read_text().split()
            ran, waited = ran + int(on), waited + int(ready)
        # user nice system idle iowait irq softirq steal ...
        line = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = sum(line[:3]) + sum(line[5:8])
        parent = os.getppid() if parent is None else parent
        own = _ticks(proc / "self") + _ticks(proc / str(parent))
    except (OSError, ValueError):
        return None
    return Sample(now, ran / 1e9, waited / 1e9, busy / _TICKS, own / _TICKS)


def _ticks(process: Path) -> int:
    # the name before them, in parentheses, may hold any characters
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def watch_contention(parent: int | None = None) -> None:
    """Sample for as long as the process lives, on a thread of its own. ``parent``: see
    ``read_sample``."""

    def work() -> None:
        meter = ContentionMeter()
        while True:
            sample = read_sample(time.monotonic(), parent=parent)
            if sample is None:
                return
            found = meter.look(sample)
            if found is not None:
                _log.warning(
                    "cores_contended waited=%.2f others=%.1f load=%.1f advice=%r",
                    found.waited,
                    found.others,
                    os.getloadavg()[0],
                    "other processes run on the engine's processors; fewer --threads lose less, "
                    "processors of its own lose nothing",
                )
            time.sleep(_LOOK)

    threading.Thread(target=work, name="contention", daemon=True).start()
