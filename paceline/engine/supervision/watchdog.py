"""Detection of engines that stand still, and their end.

This module does not know requests, or the successor of an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from paceline.errors import EngineDeadError

__all__ = ["Watched", "watch"]

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
