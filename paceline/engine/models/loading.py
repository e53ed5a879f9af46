"""Processors for a process that loads a model, or ends, next to engines that compute.

It takes no turn: its threads have the lowest priority while others compute, so it gets what they
leave. Where that is less than its share, the engine that has the turn leaves the processors to it
for a moment before it computes (``lacking``), so that a load ends, however busy the others are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from paceline.engine.models.page import LATELY, Page, Slot, lives

__all__ = ["SLICE", "Loading", "lacking"]

# part of a processor's time that a load gets at least, and seconds of a slice of it
_SHARE: Final = 0.2
SLICE: Final = 2e-3
# seconds that it may lack before steps wait for it whose tokens are due
_MOST_LACKED: Final = 0.1


class Loading:
    """A process's entry while it loads; a context manager."""

    def __init__(self, path: Path) -> None:
        now = time.monotonic()
        used = _used(os.getpid()) or 0.0
        self._page = Page(path, Slot(os.getpid(), active=now, used=used, loads=1))

    def is_crowded(self, but: int = 0) -> bool:
        """Whether an engine, of another process than ``but``, computes now, or did a moment ago."""
        now = time.monotonic()
        return any(
            slot.pid not in (0, but)
            and not slot.loads
            and (slot.since > 0 or now - slot.active < LATELY)
            # one that was killed while it waited does so for ever
            and lives(slot.pid)
            for slot in self._page.slots()
        )

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        with self._page.locked():
            self._page.set(self._page.me, Slot())
        self._page.close()


def lacking(page: Page, now: float, *, is_due: bool) -> bool:
    """Whether a process that loads is to have a slice of time before the next step. Called with the
    page locked, by the engine that has the turn.

    Args:
        is_due: the step's tokens would be late after it.
    """
    found = False
    for number, slot in enumerate(page.slots()):
        if not slot.loads:
            continue
        used = _used(slot.pid) if lives(slot.pid) else None
        if used is None:
            page.set(number, Slot())
            continue
        lacks = slot.seconds + _SHARE * (now - slot.active) - (used - slot.used)
        lacks = min(max(0.0, lacks), _MOST_LACKED)
        if lacks >= SLICE and not _wants(slot.pid):
            # it waits for a disk
            lacks = 0.0
        page.set(number, slot._replace(seconds=lacks, active=now, used=used))
        found = found or lacks >= (_MOST_LACKED if is_due else SLICE)
    return found


def _used(pid: int) -> float | None:
    """Return the seconds that a process has been on processors; None: it has ended, or the system
    does not tell."""
    try:
        # Linux numbers the clocks of other processes so
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def _wants(pid: int) -> bool:
    """Whether a thread of a process has or wants a processor."""
    try:
        tasks = [each.joinpath("stat").read_bytes() for each in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    # the name before it, in parentheses, may hold any characters
    return any(stat.rpartition(b")")[2].split()[:1] == [b"R"] for stat in tasks)
