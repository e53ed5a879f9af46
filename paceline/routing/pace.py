"""Slowness of an engine, compared with its own past and with the other engines.

A pool may mix fast and slow engines; being slower than another is no fault. An engine counts as
slow if its first tokens take several times as long as they used to at the same load, while those of
the others do not. It then gets a trickle of requests instead of its share, and its share again,
step by step, once it has recovered.

Pure: times are arguments, in seconds of a monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from paceline.errors import ConfigError

__all__ = ["TRICKLE", "Pace", "SlowStart", "slow_ones"]

# first tokens in the recent past, all needed to judge an engine
_RECENT: Final = 20
# weight of one sample in what is usual: it follows within hundreds of requests what the recent past
# shows in twenty
_STEP: Final = 0.02
_WARM_UP: Final = 20
# a slow engine has recovered below this share of the factor that made it slow
_WELL: Final = 0.5
# seconds after which a slow engine's pace becomes its usual one: the machine has changed
_NEW_NORMAL: Final = 120.0
# least seconds from a recovery until an engine can be slow again
_PAUSE: Final = 30.0
# least share of an engine that is slow, or has just come back
TRICKLE: Final = 0.1


class Pace:
    """Pace of one engine's first tokens."""

    def __init__(self) -> None:
        # usual logarithm of the ratio of actual to predicted time
        self._usual = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_usual = 0
        self._factor: float | None = None
        self.slow_since: float | None = None
        self._well_at = -math.inf
        # times it was found slow
        self.num_slow = 0

    def saw(self, seconds: float, basis: float) -> None:
        """Learn from a first token that took ``seconds``; ``basis``: its usual time at that
        load."""
        ratio = math.log(max(seconds, 1e-4) / max(basis, 1e-4))
        if len(self._recent) == _RECENT and self.slow_since is None:
            # the oldest recent sample becomes part of what is usual
            self._num_usual += 1
            step = max(_STEP, 1.0 / self._num_usual)
            self._usual += step * (self._recent[0] - self._usual)
        self._recent.append(ratio)
        self._factor = None

    @property
    def factor(self) -> float | None:
        """Factor by which first tokens take longer than usual now; None: not known yet."""
        if self._num_usual < _WARM_UP or len(self._recent) < _RECENT:
            return None
        if self._factor is None:
            self._factor = math.exp(median(self._recent) - self._usual)
        return self._factor

    def judge(self, factor: float | None, most: float, now: float) -> None:
        """Start or end slowness. ``factor``: relative to the others'; ``most``: the limit."""
        if factor is None:
            return
        if self.slow_since is None:
            if factor > most and now - self._well_at >= _PAUSE:
                self.slow_since = now
                self.num_slow += 1
        elif factor < max(1.0, _WELL * most):
            self._end(now)
        elif now - self.slow_since > _NEW_NORMAL:
            self._usual = median(self._recent)
            self._end(now)

    def _end(self, now: float) -> None:
        self.slow_since = None
        self._recent.clear()
        self._well_at = now


def slow_ones(paces: Mapping[str, Pace], most: float, now: float) -> list[str]:
    """Return a tier's slow engines, the slowest first, and never more than half: if most are slow,
    the load is the cause, and no engine is faster.

    Args:
        most: factor over the usual from which an engine is slow; 0: never.
    """
    if not most or len(paces) < 2:
        return []
    factors = {name: pace.factor for name, pace in paces.items()}
    known = sorted(factor for factor in factors.values() if factor is not None)
    for name, pace in paces.items():
        factor = factors[name]
        if factor is not None and len(known) > 1:
            pace.judge(factor / max(1.0, _median_of_others(known, factor)), most, now)
    slow = [name for name, pace in paces.items() if pace.slow_since is not None]
    slow.sort(key=lambda name: -(factors[name] or 0.0))
    return slow[: len(paces) // 2]


def _median_of_others(known: Sequence[float], factor: float) -> float:
    """Return the median of sorted values without one ``factor`` of them."""
    left_out, count = bisect_left(known, factor), len(known) - 1
    low, high = (k + (k >= left_out) for k in ((count - 1) // 2, count // 2))
    return 0.5 * (known[low] + known[high])


class SlowStart:
    """Growing share of requests for an engine that has just come back: its caches are cold, and its
    fault may persist.

    Args:
        seconds: until its share is full; 0: at once.

    Raises:
        ConfigError: negative.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0.0:
            raise ConfigError(f"slow_start must be 0 or more, got {seconds}")
        self._seconds = seconds

    def share(self, since: float, now: float) -> float:
        """Return the share of an engine that came back at ``since``."""
        if not self._seconds or now - since >= self._seconds:
            return 1.0
        return max(TRICKLE, (now - since) / self._seconds)
