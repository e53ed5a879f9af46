"""How long an engine will take, learned from how long it took.

Two linear models an engine: seconds to the first token over what lies ahead of it, and seconds per
further token over how many share the steps. They begin at a guess, and a few dozen answers replace
it. What a pool's engines are made of need not be known:
each has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Final

__all__ = ["LatencyModel", "LinearModel"]

# of the error that a sample corrects
_STEP: Final = 0.1
# keeps samples whose features are all small from counting for everything
_FLOOR: Final = 0.1
# a sample further off than this, in seconds and as a multiple of what was predicted, counts as one
# that is just so far off: an answer that an engine's policy put last says little of the next one
_FAR_SECONDS: Final = 0.25
_FAR: Final = 2.0
# seconds that a first token takes at least, as predicted
_LEAST_FIRST: Final = 0.001
# first tokens that say what is late, the fewest of them, and which of them it is
_FACTORS: Final = 64
_LEAST_FACTORS: Final = 20
_LATE: Final = 0.95


class LinearModel:
    """``y = w . x`` with weights of 0 or more, by normalised least mean squares: each sample moves
    the weights a little towards itself.

    Nothing that lies ahead of a request makes it faster: a weight below 0 is a sample's noise, and
    would draw requests to where they wait. Recursive least squares learns faster, and blows up once
    weights are held above 0 and outliers are cut.

    Args:
        weights: the first guess.
        step: of the error, that a sample corrects once there were many.
    """

    def __init__(self, weights: Sequence[float], step: float = _STEP) -> None:
        self._w = list(weights)
        self._step = step
        self.num_samples = 0

    def predict(self, x: Sequence[float]) -> float:
        assert len(x) == len(self._w), "a weight for each"
        total: float = sum(map(mul, self._w, x))
        return total

    def learn(self, x: Sequence[float], y: float) -> float:
        """Returns what was predicted until now."""
        predicted = self.predict(x)
        far = _FAR_SECONDS + _FAR * abs(predicted)
        error = min(far, max(-far, y - predicted))
        # the first samples say more than a guess does
        step = max(self._step, 1.0 / (2.0 + self.num_samples))
        gain = step * error / (_FLOOR + sum(map(mul, x, x)))
        moved = [w + gain * value for w, value in zip(self._w, x, strict=True)]
        self._w = [w if w > 0.0 else 0.0 for w in moved]
        self.num_samples += 1
        return predicted


class LatencyModel:
    """Of one engine.

    Args:
        step: see ``LinearModel``.
    """

    def __init__(self, step: float = _STEP) -> None:
        # a twentieth of a second, half a second per 1,000 tokens, and where the KV cache has no
        # room the time in which that share of it comes free
        self._first = LinearModel((0.05, 0.5, 0.0, 1.0), step)
        self._next = LinearModel((0.03, 0.001), step)
        # of the latest first tokens, how many times as long as predicted they took
        self._factors: deque[float] = deque(maxlen=_FACTORS)

    @property
    def num_samples(self) -> int:
        return self._first.num_samples

    def first_token(self, prefill_tokens: float, num_requests: float, wait: float) -> float:
        """Seconds until a first token.

        Args:
            prefill_tokens: of prompts, that are to be computed until then, its own included.
            num_requests: others at the engine.
            wait: seconds in which the KV cache that is missing comes free: the share that is
                asked for beyond what there is, by the seconds that a request holds its own.
        """
        x = (1.0, prefill_tokens / 1000.0, num_requests / 10.0, wait)
        return max(_LEAST_FIRST, self._first.predict(x))

    def next_token(self, num_requests: float) -> float:
        """Seconds per token after the first."""
        return max(0.0001, self._next.predict((1.0, num_requests / 10.0)))

    def saw_first(
        self, prefill_tokens: float, num_requests: float, wait: float, seconds: float
    ) -> None:
        """A first token came; arguments as they were when its request was sent."""
        x = (1.0, prefill_tokens / 1000.0, num_requests / 10.0, wait)
        predicted = self._first.learn(x, seconds)
        self._factors.append(seconds / max(_LEAST_FIRST, predicted))

    def late_factor(self) -> float | None:
        """How many times as long as predicted one first token of twenty takes; None: too few were
        seen."""
        if len(self._factors) < _LEAST_FACTORS:
            return None
        ordered = sorted(self._factors)
        return ordered[int(_LATE * (len(ordered) - 1))]

    def saw_next(self, num_requests: float, seconds: float) -> None:
        """An answer ended; ``seconds`` per token after its first."""
        self._next.learn((1.0, num_requests / 10.0), seconds)
