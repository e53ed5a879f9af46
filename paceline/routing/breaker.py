"""Circuit breaker: whether an engine that keeps failing may be sent requests.

::

    closed --- failures in a row, or too large a share of the window ---> open
    open   --- its time has passed ----------------------------------> half-open: one probe
    half-open --- successes in a row -> closed, its window empty
              --- a failure ----------> open, for twice as long as before

While half open it admits one probe at a time, where some breakers let everything through; it closes
after successes, not by time alone. Failures while it is open never shorten the time left.

Pure: times are arguments, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from paceline.errors import ConfigError

__all__ = ["Breaker", "BreakerSettings", "BreakerState"]

BreakerState = Literal["closed", "open", "half-open"]

# slots of the sliding window
_SLOTS: Final = 10
_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """Settings of a breaker. Raises ConfigError for a bad value."""

    # consecutive failures that open it
    max_failures: int = 5
    # share of failures in the window that opens it, from ``min_samples`` results on
    max_failure_share: float = 0.5
    min_samples: int = 10
    window_seconds: float = 10.0
    # time it stays open at first; doubled each time, up to the maximum
    open_seconds: float = 5.0
    max_open_seconds: float = 60.0
    # consecutive successes that close it
    num_successes: int = 2

    def __post_init__(self) -> None:
        for name in ("max_failures", "min_samples", "num_successes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.max_failure_share <= 1.0:
            raise ConfigError(
                f"max_failure_share must be above 0 and at most 1, got {self.max_failure_share}"
            )
        for name in ("window_seconds", "open_seconds"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_open_seconds < self.open_seconds:
            raise ConfigError(
                f"max_open_seconds must be at least open_seconds {self.open_seconds}, got "
                f"{self.max_open_seconds}"
            )


class Breaker:
    """Breaker of one engine or model."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._open_until = 0.0
        self._opened = False
        # probes running since it was half open; requests sent earlier do not count
        self._probes = 0
        self._in_a_row = 0
        self._successes = 0
        # per slot of the window: its number, successes, failures
        self._window: list[list[int]] = []
        self._slots_per_second = _SLOTS / self._settings.window_seconds
        self._next_open = self._settings.open_seconds
        # times it went from closed to open
        self.num_opened = 0
        # when failures last opened it
        self._fell_at = -math.inf
        # when it last closed again
        self.closed_at = -math.inf

    def state(self, now: float) -> BreakerState:
        if not self._opened:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        return not self._opened or (now >= self._open_until and not self._probes)

    def reopens_in(self, now: float) -> float:
        """Seconds until a probe may be sent; 0.0 if it may be sent now."""
        return max(0.0, self._open_until - now) if self._opened else 0.0

    def begin(self, now: float) -> None:
        """Note that a request is sent. Each one ends in ``succeed``, ``fail`` or ``abandon``."""
        if self._opened and now >= self._open_until:
            self._probes += 1

    def abandon(self) -> None:
        """Note an end that says nothing about the engine, such as the caller hanging up."""
        self._probes = max(0, self._probes - 1)

    def succeed(self, now: float) -> None:
        if self._probes:
            self._probes -= 1
        self._in_a_row = 0
        self._count(now, 1, 0)
        if self._opened and now >= self._open_until:
            self._successes += 1
            if self._successes >= self._settings.num_successes:
                self._opened = False
                self.closed_at = now
                self._window.clear()
                self._next_open = self._settings.open_seconds

    def fail(self, now: float) -> None:
        """Note a failure of the engine: a refused or lost connection, a 5xx, a stall."""
        self._probes = max(0, self._probes - 1)
        self._in_a_row += 1
        self._successes = 0
        self._count(now, 0, 1)
        settings = self._settings
        if self._opened:
            # requests sent before it opened say nothing new
            if now >= self._open_until:
                self._open(now)
            return
        successes = sum(slot[1] for slot in self._window)
        failures = sum(slot[2] for slot in self._window)
        share = failures / (successes + failures)
        if self._in_a_row >= settings.max_failures or (
            successes + failures >= settings.min_samples and share > settings.max_failure_share
        ):
            self.num_opened += 1
            self._opened = True
            self._fail_open(now)

    def trip(self, now: float) -> None:
        """Open at once: the engine is known to be gone."""
        if not self._opened:
            self.num_opened += 1
            self._opened = True
            self._successes = 0
            self._open(now)

    def _fail_open(self, now: float) -> None:
        """Open after too many failures; for the second time within a minute, until a minute after
        the first, so that an engine that fails now and then does not flap."""
        before = self._fell_at
        self._fell_at = now
        self._open(now)
        if now - before < _MINUTE:
            self._open_until = max(self._open_until, before + _MINUTE)

    def _open(self, now: float) -> None:
        self._probes = 0
        self._open_until = max(self._open_until, now + self._next_open)
        self._next_open = min(2.0 * self._next_open, self._settings.max_open_seconds)

    def _count(self, now: float, successes: int, failures: int) -> None:
        window, slot = self._window, int(now * self._slots_per_second)
        if not window or window[-1][0] != slot:
            while window and window[0][0] <= slot - _SLOTS:
                del window[0]
            window.append([slot, 0, 0])
        window[-1][1] += successes
        window[-1][2] += failures
