"""How often an engine may be started anew, and how long to wait before each time.

This module does not know engines, nor the clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Restarts"]

# seconds to wait before the second restart of a window; doubled for each one after
_BACKOFF: Final = 0.25
_MAX_BACKOFF: Final = 5.0


class Restarts:
    """Starts after the first within the last ``window`` seconds.

    Args:
        most: so many at most; 0: none.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self._times: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Count one more, if it is allowed: seconds to wait before it; None: there were too many.

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
        """What to say when ``take`` gave None, of an engine that was lost for ``why``."""
        if not self.most:
            return why
        return (
            f"{why}; {len(self._times)} restarts within {self.window:g} s are all that are allowed"
        )

    def __len__(self) -> int:
        """Those counted that were recent when ``take`` was last asked."""
        return len(self._times)
