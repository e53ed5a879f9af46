"""Budget of attempts beyond the first, for all requests together.

Retries, hedges, fallbacks and resumptions draw from one budget, so that a fault that fails
everything cannot multiply the load on the rest (Finagle's ``RetryBudget``; Envoy's retry budgets).
Each request deposits a share of an attempt; a floor per second lets a quiet gateway retry at all.
"""

from __future__ import annotations

from paceline.errors import ConfigError

__all__ = ["RetryBudget"]


class RetryBudget:
    """Token bucket of attempts. Pure: times are arguments, in seconds of a monotonic clock.

    Args:
        share: attempts that one request pays for.
        per_second: attempts that are free each second.
        memory: most seconds of deposits held, at ``per_second`` and at the rate of requests seen.

    Raises:
        ConfigError: a negative value.
    """

    def __init__(
        self, *, share: float = 0.2, per_second: float = 5.0, memory: float = 10.0
    ) -> None:
        for name, value in (("share", share), ("per_second", per_second), ("memory", memory)):
            if not value >= 0.0:
                raise ConfigError(f"{name} of a retry budget must be 0 or more, got {value}")
        self._share = share
        self._per_second = per_second
        self._memory = memory
        # both fade within ``memory``: the floor by its cap, deposits by their age
        self._floor = per_second * memory
        self._deposited = 0.0
        self._at = 0.0

    def deposit(self, now: float) -> None:
        """Note that a request has arrived."""
        self._pass(now)
        self._deposited += self._share

    def take(self, now: float, *, overdraw: bool = False) -> bool:
        """Take one attempt; return False if none is left.

        Args:
            overdraw: take it down to one attempt below zero: a caller that has read half an answer
                has paid for the other half.
        """
        self._pass(now)
        if self._deposited + self._floor < (0.0 if overdraw else 1.0):
            return False
        taken = min(1.0, self._deposited)
        self._deposited -= taken
        self._floor -= 1.0 - taken
        return True

    def left(self, now: float) -> float:
        """Attempts that may be taken now."""
        self._pass(now)
        return max(0.0, self._deposited + self._floor)

    def _pass(self, now: float) -> None:
        seconds, memory = now - self._at, self._memory
        if seconds > 0.0:
            self._at = now
            self._floor = min(self._floor + self._per_second * seconds, self._per_second * memory)
            self._deposited *= 1.0 - seconds / memory if seconds < memory else 0.0
        elif memory <= 0.0:
            self._deposited = 0.0
