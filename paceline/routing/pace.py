"""Whether an engine has become slow, against what is usual for it and for the others.

A pool may be of fast and slow engines; that one is slower than another is no fault. What counts is
that its first tokens take several times as long as they used to at that load, while the others' do
not. Such an engine gets a trickle of requests instead of its share, and its share again, little by
little, once it is well.

Pure: seconds of a clock that does not go back are an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from paceline.core.errors import ConfigError

__all__ = ["TRICKLE", "Pace", "SlowStart", "slow_ones"]

# first tokens that the recent past is made of, and the least that judge an engine
_RECENT: Final = 20
# of what is usual, that one sample moves; it follows in hundreds of requests what the recent past
# shows in twenty
_STEP: Final = 0.02
_WARM_UP: Final = 20
# an engine that is slow is well again below this share of the factor that made it slow
_WELL: Final = 0.5
# seconds after which what was slow is what is usual: the machine is another one now
_NEW_NORMAL: Final = 120.0
# between two times that an engine is found slow
_PAUSE: Final = 30.0
# least share of an engine that is slow, or has just come back
TRICKLE: Final = 0.1


class Pace:
    """Of one engine's first tokens."""

    def __init__(self) -> None:
        # of the ratio to what was predicted, its usual logarithm
        self._usual = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_usual = 0
        self._factor: float | None = None
        self.slow_since: float | None = None
        self._well_at = -math.inf
        # times it was found slow
        self.num_slow = 0

    def saw(self, seconds: float, basis: float) -> None:
        """A first token took ``seconds``; ``basis``: what it usually takes with as much ahead
        of it."""
        ratio = math.log(max(seconds, 1e-4) / max(basis, 1e-4))
        if len(self._recent) == _RECENT and self.slow_since is None:
            # what was recent is usual by now
            self._num_usual += 1
            step = max(_STEP, 1.0 / self._num_usual)
            self._usual += step * (self._recent[0] - self._usual)
        self._recent.append(ratio)
        self._factor = None

    @property
    def factor(self) -> float | None:
        """How many times as long as usual first tokens take now; None: that is not known yet."""
        if self._num_usual < _WARM_UP or len(self._recent) < _RECENT:
            return None
        if self._factor is None:
            self._factor = math.exp(median(self._recent) - self._usual)
        return self._factor

    def judge(self, factor: float | None, most: float, now: float) -> None:
        """``factor`` as above, the others' taken off; ``most``: from there on it is slow."""
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
    """Those of a tier's engines that are slow, the slowest first, and never more than half: where
    most are slow, it is the load, and there is nobody to be faster.

    Args:
        most: times the usual from which an engine is slow; 0: none ever is.
    """
    if not most or len(paces) < 2:
        return []
    factors = {name: pace.factor for name, pace in paces.items()}
    for name, pace in paces.items():
        factor = factors[name]
        others = [f for other, f in factors.items() if other != name and f is not None]
        if factor is not None and others:
            factor /= max(1.0, median(others))
        pace.judge(factor if others else None, most, now)
    slow = [name for name, pace in paces.items() if pace.slow_since is not None]
    slow.sort(key=lambda name: -(factors[name] or 0.0))
    return slow[: len(paces) // 2]


class SlowStart:
    """The share of its requests that an engine gets which has just come back: its caches are cold,
    and what it failed of may not be over.

    Args:
        seconds: until it has all of them; 0: at once.

    Raises:
        ConfigError: fewer.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0.0:
            raise ConfigError(f"slow_start must be 0 or more, got {seconds}")
        self._seconds = seconds

    def share(self, since: float, now: float) -> float:
        """``since``: when it came back."""
        if not self._seconds or now - since >= self._seconds:
            return 1.0
        return max(TRICKLE, (now - since) / self._seconds)
