"""Statistics of several engines, one after the other, as if they had been one."""

from __future__ import annotations

import msgspec

from paceline.engine.types import EngineStats

__all__ = ["added"]


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """``now`` with its counters continuing those of ``before``, so that none ever falls."""
    return msgspec.structs.replace(
        now,
        num_steps=before.num_steps + now.num_steps,
        scheduler=now.scheduler.after(before.scheduler),
    )
