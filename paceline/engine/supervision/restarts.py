"""Detection of engines that stand still, their end, and the limit on restarts.

This module does not know requests. ``Restarts`` does not know engines, nor the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from paceline.errors import EngineDeadError

__all__ = ["Restarts", "Watched", "watch"]

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


# seconds between checks of the engine
_LOOK: Final = 0.25
# seconds after which a process that the operating system has stopped counts as lost
_HALTED: Final = 1.0


class Watched(Protocol):
    """An engine's client, as far as the watchdog needs it."""

    @property
    def is_stopped(self) -> bool: ...

    def check_health(self) -> None: ...

    def forgive(self, seconds: float) -> None: ...


_W = TypeVar("_W", bound=Watched)


async def watch(current: Callable[[], _W | None], end: Callable[[_W, str, str], None]) -> None:
    """Check the present engine until cancelled. Time in which this process itself stood still
    (suspended, starved) does not count.

    Args:
        current: returns the engine, if there is one.
        end: ends it; arguments are the kind of failure ("stopped", "stalled") and the reason.
    """
    halted_since: float | None = None
    before = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK)
        now = time.monotonic()
        overslept = now - before - _LOOK
        before = now
        client = current()
        if client is None:
            halted_since = None
            continue
        if overslept > _LOOK:
            client.forgive(overslept)
            halted_since = None
        if not client.is_stopped:
            halted_since = None
        elif halted_since is None:
            halted_since = now
        elif now - halted_since >= _HALTED:
            end(client, "stopped", f"the engine process was stopped for {_HALTED:g} s")
            continue
        try:
            client.check_health()
        except EngineDeadError as error:
            end(client, "stalled", str(error))
