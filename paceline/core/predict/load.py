"""Which share of the time ordinary requests needed lately.

This module does not know requests.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["RecentLoad"]

# seconds over which the share is taken
_LATELY: Final = 10.0


class RecentLoad:
    """Predicted seconds of steps, less best effort, with exponential forgetting."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._as_of = 0.0

    def note(self, starts: float, seconds: float) -> None:
        """A step that begins at ``starts`` is predicted to last so long without best effort."""
        self._seconds *= math.exp(min(0.0, self._as_of - starts) / _LATELY)
        self._seconds += seconds
        self._as_of = starts

    @property
    def share(self) -> float:
        """Of the time lately; it may be above 1."""
        return self._seconds / _LATELY
