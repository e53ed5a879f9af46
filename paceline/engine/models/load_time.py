"""Seconds of a model's load, or of a swap of models, learned from those before.

Before a model was loaded once, bytes decide: all models share the disk and the processors.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LoadTimes"]

# a start without a model, and a byte, before any load was measured: slow disks are worse
_START_SECONDS: Final = 0.5
_SECONDS_PER_BYTE: Final = 1e-9
# part of a newer measurement in what is known
_NEW: Final = 0.5


class LoadTimes:
    """Predicts loads by name."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        # measured seconds over those that bytes had predicted
        self._factor = 1.0

    def known(self, name: str) -> float | None:
        """Return the seconds as measured; None: not yet."""
        return self._known.get(name)

    def predict(self, name: str, num_bytes: int) -> float:
        """Return the seconds that a load will take."""
        known = self._known.get(name)
        return self._factor * _by_bytes(num_bytes) if known is None else known

    def observe(self, name: str, num_bytes: int, seconds: float) -> None:
        """Learn from a load."""
        factor = seconds / _by_bytes(num_bytes)
        self._factor += _NEW * (factor - self._factor)
        before = self._known.get(name, seconds)
        self._known[name] = before + _NEW * (seconds - before)


def _by_bytes(num_bytes: int) -> float:
    return _START_SECONDS + _SECONDS_PER_BYTE * num_bytes
