"""Detection of engines that stand still, their end, and the limits on restarts and on the loads of
adapters that end engines.

This module does not know requests. ``Restarts`` and ``DeadlyLoads`` know no engines, nor the clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from paceline.errors import EngineDeadError, EngineLostError

__all__ = ["DeadlyLoads", "Restarts", "Watched", "watch"]

_log = logging.getLogger(__name__)

# seconds for which an adapter is not loaded after its load ended the engine twice
_SECONDS: Final = 60.0


class DeadlyLoads:
    """Losses of engines by the path of an adapter that was being loaded: after the second one it is
    left alone for a while."""

    def __init__(self) -> None:
        self._losses: Counter[str] = Counter()
        self._until: dict[str, float] = {}

    def __contains__(self, path: str) -> bool:
        """Whether a path is left alone, or was until ``check`` let it go."""
        return path in self._until

    def note(self, paths: Iterable[str], now: float) -> None:
        """Count the end of an engine that was loading these."""
        for path in set(paths):
            self._losses[path] += 1
            if self._losses[path] > 1:
                self._until[path] = now + _SECONDS
                _log.error("adapter_suspended path=%s losses=%d", path, self._losses[path])

    def check(self, path: str, now: float) -> bool:
        """Return whether a path has its next try from now on, as its time is over. Raises
        EngineLostError while it is left alone."""
        until = self._until.get(path)
        if until is None:
            return False
        if now < until:
            raise EngineLostError(
                f"the engine ended {self._losses[path]} times while this adapter was loaded; it is "
                f"not loaded for {until - now:.0f} s",
                until - now,
            )
        del self._until[path]
        return True


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
