"""Latency predictions per engine, learned from past requests.

Each engine has two linear models: seconds to the first token over the work ahead of it, and seconds
per further token over the number of requests that share the steps. They begin with a guess that a
few dozen answers replace, so nothing need be known about the engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Final

__all__ = ["LatencyModel", "LinearModel"]

# share of the error that a sample corrects
_STEP: Final = 0.1
# samples that the experience of others counts for at most: with as many, ``_STEP`` is in force
_TAKEN: Final = 8
# keeps samples with small features from dominating
_FLOOR: Final = 0.1
# bounds on a sample's error, in seconds and as a multiple of the prediction: a request that the
# engine's policy put last says little about the next one
_FAR_SECONDS: Final = 0.25
_FAR: Final = 2.0
# least predicted first-token time, s
_LEAST_FIRST: Final = 0.001
# first tokens that define late, the fewest of them, and the quantile
_FACTORS: Final = 64
_LEAST_FACTORS: Final = 20
_LATE: Final = 0.95


class LinearModel:
    """Linear model ``y = w . x`` with weights of 0 or more, by normalised least mean squares: each
    sample moves the weights a little towards itself.

    Nothing ahead of a request makes it faster: a negative weight is noise, and would attract
    requests to where others wait. Recursive least squares learns faster, but diverges once weights
    are clipped at 0 and outliers are cut.

    Args:
        weights: the initial guess.
        step: share of the error that a sample corrects, once there were many.
    """

    def __init__(self, weights: Sequence[float], step: float = _STEP) -> None:
        self.weights = list(weights)
        self._step = step
        self.num_samples = 0

    def predict(self, x: Sequence[float]) -> float:
        # ``learn`` checks that there is a weight for each
        total: float = sum(map(mul, self.weights, x))
        return total

    def average(self, others: Sequence[LinearModel]) -> None:
        """Take over the mean of what other models have learned, if any has."""
        known = [each for each in others if each.num_samples]
        if known:
            columns = zip(*(each.weights for each in known), strict=True)
            self.weights = [sum(column) / len(known) for column in columns]
            # a first answer, which may be slow, does not replace what others know
            self.num_samples = min(_TAKEN, min(each.num_samples for each in known))

    def learn(self, x: Sequence[float], y: float) -> float:
        """Learn from a sample; return what was predicted for it."""
        predicted = self.predict(x)
        far = _FAR_SECONDS + _FAR * abs(predicted)
        error = min(far, max(-far, y - predicted))
        # the first samples weigh more, as they replace a guess
        step = max(self._step, 1.0 / (2.0 + self.num_samples))
        gain = step * error / (_FLOOR + sum(map(mul, x, x)))
        moved = [w + gain * value for w, value in zip(self.weights, x, strict=True)]
        self.weights = [w if w > 0.0 else 0.0 for w in moved]
        self.num_samples += 1
        return predicted


class LatencyModel:
    """Latency model of one engine.

    Args:
        step: see ``LinearModel``.
    """

    def __init__(self, step: float = _STEP) -> None:
        # 0.05 s, 0.5 s per 1,000 tokens to compute, nothing per request, and the whole wait for
        # missing KV cache
        self._first = LinearModel((0.05, 0.5, 0.0, 1.0), step)
        self._next = LinearModel((0.03, 0.001), step)
        # ratios of actual to predicted time of the latest first tokens
        self._factors: deque[float] = deque(maxlen=_FACTORS)

    def average(self, others: Sequence[LatencyModel]) -> None:
        """Take over the mean of what other engines' models have learned."""
        self._first.average([each._first for each in others])
        self._next.average([each._next for each in others])

    @property
    def num_samples(self) -> int:
        return self._first.num_samples

    def first_token(self, prefill_tokens: float, num_requests: float, wait: float) -> float:
        """Predict the seconds until a first token.

        Args:
            prefill_tokens: prompt tokens to compute until then, its own included.
            num_requests: other requests at the engine.
            wait: seconds until the missing KV cache is free: the share that it lacks, times the
                seconds that a request holds its own.
        """
        # by hand, as every choice does it
        least, prefill, others, missing = self._first.weights
        seconds = least + prefill * (prefill_tokens / 1000.0) + others * (num_requests / 10.0)
        return max(_LEAST_FIRST, seconds + missing * wait)

    def next_token(self, num_requests: float) -> float:
        """Predict the seconds per token after the first."""
        least, others = self._next.weights
        return max(0.0001, least + others * (num_requests / 10.0))

    def saw_first(
        self, prefill_tokens: float, num_requests: float, wait: float, seconds: float
    ) -> None:
        """Learn from a first token; arguments as they were when its request was sent."""
        x = (1.0, prefill_tokens / 1000.0, num_requests / 10.0, wait)
        predicted = self._first.learn(x, seconds)
        self._factors.append(seconds / max(_LEAST_FIRST, predicted))

    def late_factor(self) -> float | None:
        """Return the 95 % quantile of actual over predicted first-token times; None: too few were
        seen."""
        if len(self._factors) < _LEAST_FACTORS:
            return None
        return sorted(self._factors)[int(_LATE * (len(self._factors) - 1))]

    def saw_next(self, num_requests: float, seconds: float) -> None:
        """Learn from an answer's end; ``seconds`` per token after its first."""
        self._next.learn((1.0, num_requests / 10.0), seconds)
