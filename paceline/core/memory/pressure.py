"""The memory-pressure valve: measures, in order, as the KV cache fills.

::

    use     0.88        0.91             0.94              0.97
    level   1           2                3                 4
            smaller     best effort is   best effort is    no request is
            chunks      not admitted     preempted         queued (while others wait)

A level ends once use is ``HYSTERESIS`` below where the level began, so the valve does not flutter.
This module does not know requests.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["HYSTERESIS", "STEP", "Pressure", "PressureValve"]

STEP: Final = 0.03
HYSTERESIS: Final = 0.05
# fewest prompt tokens of a step under memory pressure
_MIN_CHUNK: Final = 32


class Pressure(enum.IntEnum):
    """How far the valve is open; each level includes the lower ones."""

    CLOSED = 0
    SMALL_CHUNKS = 1
    HOLD_BEST_EFFORT = 2
    PREEMPT_BEST_EFFORT = 3
    REFUSE = 4


class PressureValve:
    """Opens at ``threshold`` (a share of the cache in use); at 1.0 it stays closed."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        # half the threshold if that is less, or a level would never end
        self._hysteresis = min(HYSTERESIS, threshold / 2)
        self.level = Pressure.CLOSED

    def update(self, usage: float) -> Pressure:
        """Set the present use, 0 to 1, and return the level."""
        if self.threshold >= 1.0:
            return self.level
        # a threshold near 1 leaves less room: the levels then share what there is
        step = min(STEP, (1.0 - self.threshold) / Pressure.REFUSE)
        first, lowest = self.threshold, self.threshold - self._hysteresis
        opened = sum(usage >= first + level * step for level in range(Pressure.REFUSE))
        kept = sum(usage >= lowest + level * step for level in range(Pressure.REFUSE))
        self.level = Pressure(min(kept, max(opened, self.level)))
        return self.level

    def cap(self, tokens: int, num_running: int) -> int:
        """Return a step's token budget out of ``tokens``: under pressure, prompts get a quarter."""
        if self.level < Pressure.SMALL_CHUNKS:
            return tokens
        return min(tokens, num_running + max(_MIN_CHUNK, (tokens - num_running) // 4))
