"""Statistics of several engines in succession, summed as if they were one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import msgspec

from paceline.engine.types import EngineStats, SchedulerStats

__all__ = ["COUNTERS", "added"]

# the fields of SchedulerStats that add up; the others are present values
COUNTERS: Final = tuple(f.name for f in fields(SchedulerStats) if f.metadata.get("counts"))


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return ``now`` with its counters continuing those of ``before``, so that none ever falls."""
    old, new = before.scheduler, now.scheduler
    totals = {name: _sum(getattr(old, name), getattr(new, name)) for name in COUNTERS}
    return msgspec.structs.replace(
        now, num_steps=before.num_steps + now.num_steps, scheduler=replace(new, **totals)
    )


def _sum(before: Any, now: Any) -> Any:
    """Add two numbers, or numbers by name."""
    if not isinstance(now, tuple):
        return before + now
    total = dict(before)
    for name, count in now:
        total[name] = total.get(name, 0) + count
    return tuple(total.items())
