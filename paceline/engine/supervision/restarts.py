"""Limit on restarts of the engine, and the wait before each.

This module does not know engines, nor the clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Restarts"]

# seconds to wait before the second restart of a window; doubled for each later one
_BACKOFF: Final = 0.25
_MAX_BACKOFF: Final = 5.0


class Restarts:
    """Restarts within the last ``window`` seconds; the first start does not count.

    Args:
        most: largest number of restarts; 0: none.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._times: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Count one more, if allowed, and return the seconds to wait before it; None: too many.

        Args:
            now: in seconds of a clock that never goes back.
        """
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        recent = len(self._times)
        if recent >= self.most:
            return None
        self._times.append(now)
        return min(_MAX_BACKOFF, _BACKOFF * 2.0 ** (recent - 1)) if recent else 0.0

    def spent(self, why: str) -> str:
        """Return the message for an engine lost because of ``why`` after ``take`` returned None."""
        if not self.most:
            return why
        return (
            f"{why}; {len(self._times)} restarts within {self.window:g} s are all that are allowed"
        )

    def __len__(self) -> int:
        """Return the number of restarts that were recent at the last ``take``."""
        return len(self._times)
