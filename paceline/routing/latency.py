"""How long an engine will take, learned from how long it took.

Two linear models an engine, by recursive least squares with forgetting: seconds to the first token
over what lies ahead of it, and seconds per further token over how many share the steps. They begin
at a guess, and a few dozen answers replace it. What a pool's engines are made of need not be known:
each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["LatencyModel", "LeastSquares"]

# of older samples, per new one
_FORGETTING: Final = 0.99
# how little the first guess weighs: variance of its coefficients
_DOUBT: Final = 1.0
# beyond this the oldest directions are not forgotten any further, or an idle feature would make
# the next sample with it count for everything (wind-up)
_MAX_DOUBT: Final = 100.0


class LeastSquares:
    """``y = w . x``, renewed with each sample.

    Args:
        weights: the first guess.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        size = len(weights)
        self._w = list(weights)
        self._p = [[_DOUBT if i == j else 0.0 for j in range(size)] for i in range(size)]
        self.num_samples = 0

    def predict(self, x: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(self._w, x, strict=True))

    def learn(self, x: Sequence[float], y: float) -> None:
        p = self._p
        px = [sum(a * b for a, b in zip(row, x, strict=True)) for row in p]
        scale = _FORGETTING + sum(a * b for a, b in zip(x, px, strict=True))
        gain = [value / scale for value in px]
        error = y - self.predict(x)
        self._w = [w + k * error for w, k in zip(self._w, gain, strict=True)]
        trace = sum(p[i][i] for i in range(len(p)))
        keep = 1.0 if trace > _MAX_DOUBT * len(p) else _FORGETTING
        self._p = [
            [(value - k * other) / keep for value, other in zip(row, px, strict=True)]
            for row, k in zip(p, gain, strict=True)
        ]
        self.num_samples += 1


class LatencyModel:
    """Of one engine."""

    def __init__(self) -> None:
        # a twentieth of a second, half a second per 1,000 tokens, and a long wait where the KV
        # cache has no room
        self._first = LeastSquares((0.05, 0.5, 0.0, 5.0))
        self._next = LeastSquares((0.03, 0.001))

    @property
    def num_samples(self) -> int:
        return self._first.num_samples

    def first_token(self, prefill_tokens: float, num_requests: float, overcommit: float) -> float:
        """Seconds until a first token.

        Args:
            prefill_tokens: of prompts, that are to be computed until then, its own included.
            num_requests: others at the engine.
            overcommit: KV cache that is asked for beyond what there is, as a share of it.
        """
        x = (1.0, prefill_tokens / 1000.0, num_requests / 10.0, overcommit)
        return max(0.001, self._first.predict(x))

    def next_token(self, num_requests: float) -> float:
        """Seconds per token after the first."""
        return max(0.0001, self._next.predict((1.0, num_requests / 10.0)))

    def saw_first(
        self, prefill_tokens: float, num_requests: float, overcommit: float, seconds: float
    ) -> None:
        """A first token came; arguments as they were when its request was sent."""
        x = (1.0, prefill_tokens / 1000.0, num_requests / 10.0, overcommit)
        self._first.learn(x, seconds)

    def saw_next(self, num_requests: float, seconds: float) -> None:
        """An answer ended; ``seconds`` per token after its first."""
        self._next.learn((1.0, num_requests / 10.0), seconds)
