"""Statistics of several engines, one after the other, as if they had been one."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from paceline.engine.types import EngineInfo, EngineStats

__all__ = ["added", "at_rest"]

# what adds up; the rest of a snapshot is how things are now
_COUNTERS: Final = (
    "num_steps",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_recomputed_tokens",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
    "num_relegated",
    "num_discarded_tokens",
    "num_prefill_tokens",
    "num_decode_tokens",
    "predicted_step_seconds",
    "actual_step_seconds",
)

_N = TypeVar("_N", int, float)


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """``now`` with its counters continuing those of ``before``, so that none ever falls."""
    counters = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    return msgspec.structs.replace(
        now,
        refused=_sum(before.refused, now.refused),
        waited=_sum(before.waited, now.waited),
        **counters,
    )


def at_rest(info: EngineInfo) -> EngineStats:
    """Of an engine that has done nothing and does nothing."""
    return EngineStats(
        time=0.0, num_steps=0, num_blocks=info.num_blocks, num_free_blocks=info.num_blocks
    )


def _sum(
    before: tuple[tuple[str, _N], ...], now: tuple[tuple[str, _N], ...]
) -> tuple[tuple[str, _N], ...]:
    total = dict(before)
    for name, count in now:
        total[name] = total[name] + count if name in total else count
    return tuple(total.items())
