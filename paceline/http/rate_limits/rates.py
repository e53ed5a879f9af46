"""Limits, and the arithmetic of a sliding window. Pure: no clock, no storage.

A limit of A in S seconds is held by two counters, of the present window of S seconds and of the one
before it. The use is

    used = floor(previous * previous_left / S) + current

where ``previous_left`` seconds of the previous window still lie within the last S seconds. So no
caller gets two windows' worth at their border, and memory per key is two numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.errors import ConfigError

__all__ = [
    "NO_LIMITS", "UNLIMITED", "KeyLimits", "Rate", "Want", "Window", "go_duration",
    "parse_override",
]  # fmt: skip

UNLIMITED: Final = "unlimited"
_RATE: Final = re.compile(r"([0-9]{1,15})/([0-9]{1,6})?([a-z]+)")
_UNITS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_UNITS_SHORT: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_SECONDS: Final = 366 * 86400
# 1/n of what is left, reserved by a request that takes as much as it may
_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per number of seconds. Raises ConfigError unless both are at least 1."""

    amount: int
    seconds: int

    def __post_init__(self) -> None:
        if self.amount < 1 or not 1 <= self.seconds <= _MAX_SECONDS:
            raise ConfigError(
                f"a rate is at least 1 per 1 to {_MAX_SECONDS} seconds, got {self.amount} in "
                f"{self.seconds}"
            )

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Parse ``60/minute``, ``5/10s``, ``100000/day``. Raises ConfigError for anything else."""
        match = _RATE.fullmatch(text)
        unit = None if match is None else (_UNITS | _UNITS_SHORT).get(match[3])
        if match is None or unit is None:
            raise ConfigError(
                f"a rate is written N/second, N/minute, N/hour, N/day or N/10s, got {text[:80]!r}"
            )
        return cls(int(match[1]), (int(match[2]) if match[2] else 1) * unit)

    def __str__(self) -> str:
        for name, seconds in _UNITS.items():
            if self.seconds == seconds:
                return f"{self.amount}/{name}"
        return f"{self.amount}/{self.seconds}s"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None is no limit. Raises ConfigError for a bad ``concurrent``."""

    # every POST counts, with any result
    requests: Rate | None = None
    # prompt and output tokens; reserved tokens that the output does not use are given back
    tokens: Rate | None = None
    # generation requests between admission and the last token
    concurrent: int | None = None

    def __post_init__(self) -> None:
        if self.concurrent is not None and self.concurrent < 1:
            raise ConfigError(f"concurrent must be at least 1, got {self.concurrent}")

    def __bool__(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS: Final = KeyLimits()


def parse_override(word: str) -> tuple[str, Any]:
    """Parse a field of KeyLimits and its value, from ``requests=60/minute``, ``tokens=unlimited``
    or ``concurrent=4``. Raises ConfigError."""
    name, _, value = word.partition("=")
    if name not in ("requests", "tokens", "concurrent") or not value:
        raise ConfigError(
            "the limits of an API key are requests=RATE, tokens=RATE and concurrent=N, each also "
            f"=unlimited, got {word[:80]!r}"
        )
    if value == UNLIMITED:
        return name, None
    if name == "concurrent":
        if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
            raise ConfigError(f"concurrent must be a number from 1, got {value[:80]!r}")
        return name, int(value)
    return name, Rate.parse(value)


@dataclass(frozen=True, slots=True)
class Want:
    """Amount to reserve for a request, of tokens or of money: as much as it may use, if that is
    known, and otherwise a share of what is left.

    Code that reserves less than ``most`` must make sure that the request uses no more.
    """

    # the least with which it may begin
    least: int
    # a reservation up to this may exceed the share of what is left
    usual: int
    most: int
    # the least that it takes in any case
    bare: int

    @classmethod
    def exactly(cls, amount: int) -> Want:
        return cls(amount, amount, amount, amount)

    def within(self, limit: int) -> Want:
        """Adjust to a limit: if ``least`` exceeds it, the whole limit is enough."""
        return replace(self, least=min(self.least, max(self.bare, limit)))

    def of(self, left: int) -> int:
        """Return how much to reserve with ``left`` remaining; ``least`` if less remains."""
        return max(self.least, min(self.most, max(self.usual, left // _SHARE), left))


@dataclass(frozen=True, slots=True)
class Window:
    """The two counters of one limit at one moment."""

    rate: Rate
    previous: int
    # seconds for which the previous window still counts
    previous_left: float
    current: int
    # seconds until the current window becomes the previous one
    rolls_in: float
    # index of the present window among a store's successive windows
    epoch: int = 0

    @property
    def used(self) -> int:
        return math.floor(self.previous * self.previous_left / self.rate.seconds) + self.current

    @property
    def remaining(self) -> int:
        return max(0, self.rate.amount - self.used)

    @property
    def reset_after(self) -> float:
        """Seconds until the limit is full again, without further requests."""
        if self.current > 0:
            return self.rolls_in + self.rate.seconds
        return self.previous_left if self.previous > 0 else 0.0

    def retry_after(self, cost: int) -> float:
        """Seconds until ``cost``, at most the amount, fits without further requests."""
        seconds = self.rate.seconds
        room = self.rate.amount - cost
        if self.used <= room:
            return 0.0
        # the floor lets one more pass than the weights alone
        if self.current <= room:
            return max(
                0.0, self.previous_left - (room - self.current + 1) * seconds / self.previous
            )
        # the present count becomes the previous window's, and then fades
        return self.rolls_in + max(0.0, seconds - (room + 1) * seconds / self.current)


def go_duration(seconds: float) -> str:
    """Format seconds as OpenAI does in headers: ``20ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1e3:g}s"
    minutes, rest = divmod(math.ceil(milliseconds / 1e3), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
