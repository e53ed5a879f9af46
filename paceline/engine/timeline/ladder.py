"""How much of an engine's work is told, by what telling it costs.

::

    level   told
    0       everything
    1       in one step of eight, who computed a chunk and who sat out; all else always
    2       steps summed over 10 ms, but for those in which a request came or went
    3       requests that come and end, and nothing of steps

Once a second it goes a level down where telling took more than a percent of a core, or up again
where it has taken less than half of that for a while. This module does not know what is told.
"""

from __future__ import annotations

import math
from typing import Final

from paceline.engine.timeline.codec import encode
from paceline.engine.timeline.events import FrameType, Told

__all__ = ["LEVELS", "THIN", "Ladder"]

LEVELS: Final = 4
# steps at level 1 of which one is told whole
THIN: Final = 8
# share of a core above which less is told, and below which more is; seconds before it is tried
_MOST: Final = 0.01
_LEAST: Final = 0.005
_PATIENCE: Final = 10.0
# seconds between looks
_LOOK: Final = 1.0


class Ladder:
    """The level, and what it is decided by: ``spent`` is added to by whoever tells, in seconds."""

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
        """The frame that says so where the level has changed, else none."""
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
