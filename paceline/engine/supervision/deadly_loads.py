"""Adapters whose load ended the engine: after the second time they are left alone for a while.

This module does not know engines or the clock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

from paceline.errors import EngineLostError

__all__ = ["DeadlyLoads"]

_log = logging.getLogger(__name__)

# seconds for which an adapter is not loaded after its load ended the engine twice
_SECONDS: Final = 60.0


class DeadlyLoads:
    """Losses of engines by the path of an adapter that was being loaded."""

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
