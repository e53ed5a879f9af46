"""How much of an engine's work the timeline covers, by the cost of writing it.

::

    level   written
    0       everything
    1       chunks and skipped requests in one step of eight only; everything else
    2       steps summed over 10 ms, except those in which a request came or left
    3       arrivals and ends of requests, and no steps

Once a second the level rises by one if writing took more than a percent of a core, or falls again
if it has taken less than half of that for a while. This module does not know the frames.
"""

from __future__ import annotations

import math
from typing import Final

from paceline.timeline.codec import encode
from paceline.timeline.events import FrameType, Told

__all__ = ["LEVELS", "THIN", "Ladder"]

LEVELS: Final = 4
# steps at level 1 of which one is written completely
THIN: Final = 8
# share of a core above which less is written, and below which more is; seconds before more is tried
_MOST: Final = 0.01
_LEAST: Final = 0.005
_PATIENCE: Final = 10.0
# seconds between checks
_LOOK: Final = 1.0


class Ladder:
    """The level, and its basis: the writer adds the seconds that it takes to ``spent``."""

    def __init__(self) -> None:
        self.level = 0
        self.spent = 0.0
        self._looked_at = -math.inf
        self._lowered_at = -math.inf

    @property
    def tells_steps(self) -> bool:
        return self.level < LEVELS - 1

    def is_due(self, now: float) -> bool:
        return now - self._looked_at >= _LOOK

    def look(self, now: float) -> bytes:
        """Update the level; return a frame about its change, else no bytes."""
        share = self.spent / (now - self._looked_at)
        self._looked_at, self.spent = now, 0.0
        if share > _MOST and self.tells_steps:
            self.level += 1
        elif share < _LEAST and self.level and now - self._lowered_at >= _PATIENCE:
            self.level -= 1
        else:
            return b""
        self._lowered_at = now
        told = {"kind": "level", "level": self.level, "every": THIN, "share": round(share, 5)}
        return encode(Told(FrameType.NOTICE, told))
