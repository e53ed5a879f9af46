"""Linear scorer: the predicted probability that a small model's answer loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

__all__ = ["Features", "Scorer", "fit_scorer"]

# steps of Newton's method, which ends sooner where it has converged
_STEPS: Final = 50
_CLOSE: Final = 1e-8


class Features(msgspec.Struct, frozen=True):
    """Features of one request."""

    # hashed n-grams of the prompt, a vector of length 1
    ngrams: NDArray[np.float32]
    # form of the prompt, then, where the model has answered, its confidence
    dense: NDArray[np.float32]


class Scorer(msgspec.Struct, frozen=True):
    """Weights of a logistic model; ``to_bytes`` and ``of_bytes`` for its file."""

    bias: float
    ngrams: NDArray[np.float32]
    # weights of the dense features, with their scaling taken in
    dense: NDArray[np.float32]

    def score(self, features: Features) -> float:
        """Return the score, 0 to 1."""
        # ``dot`` needs two thirds of the time of ``@``
        total = self.bias + float(self.ngrams.dot(features.ngrams))
        total += float(self.dense.dot(features.dense))
        return 1.0 / (1.0 + math.exp(-min(30.0, max(-30.0, total))))

    def to_bytes(self) -> bytes:
        return np.concatenate(
            (np.array([self.bias], "<f4"), self.ngrams, self.dense), dtype="<f4"
        ).tobytes()

    @classmethod
    def of_bytes(cls, data: bytes, num_ngrams: int, num_dense: int) -> Scorer:
        """Read a scorer. Raises ConfigError if it has another number of weights."""
        wanted = 4 * (1 + num_ngrams + num_dense)
        if len(data) != wanted:
            raise ConfigError(f"weights have {len(data)} bytes, and {wanted} are wanted")
        weights = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.isfinite(weights).all():
            raise ConfigError("weights are not all finite")
        return cls(float(weights[0]), weights[1 : 1 + num_ngrams], weights[1 + num_ngrams :])


def fit_scorer(samples: Sequence[Features], good: Sequence[bool], penalty: float = 1.0) -> Scorer:
    """Fit a scorer by logistic regression with an L2 penalty.

    Newton's method over the samples rather than the weights: with fewer samples than weights that
    is the smaller system. Dense features are scaled to mean 0 and variance 1 first.

    Args:
        good: whether each sample's answer loses nothing.
    """
    dense = np.array([each.dense for each in samples], np.float64)
    mean, spread = dense.mean(axis=0), dense.std(axis=0)
    scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0)
    scaled = (dense - mean) * scale
    rows = np.hstack([np.array([each.ngrams for each in samples], np.float64), scaled])
    duals, bias = _fit_duals(rows @ rows.T, np.array(good, np.float64), penalty)
    weights = rows.T @ duals
    num_ngrams = rows.shape[1] - scaled.shape[1]
    of_dense = weights[num_ngrams:] * scale
    return Scorer(
        float(bias - of_dense @ mean),
        weights[:num_ngrams].astype(np.float32),
        of_dense.astype(np.float32),
    )


def _fit_duals(
    kernel: NDArray[np.float64], good: NDArray[np.float64], penalty: float
) -> tuple[NDArray[np.float64], float]:
    """Return ``duals`` and bias with the least of the log loss plus penalty / 2 * |w|^2, where w is
    the sum of the rows times ``duals``."""
    count = len(good)
    # a scorer that has seen one outcome alone must stay finite
    share = (good.sum() + 0.5) / (count + 1.0)
    duals, bias = np.zeros(count), math.log(share / (1.0 - share))
    if good.min() == good.max():
        return duals, bias
    system = np.zeros((count + 1, count + 1))
    for _ in range(_STEPS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(kernel @ duals + bias, -30.0, 30.0)))
        curve = np.maximum(chance * (1.0 - chance), 1e-6)
        # at the optimum penalty * duals = good - chance, and those sum to 0
        wrong = penalty * duals - (good - chance)
        system[:count, :count] = curve[:, None] * kernel + penalty * np.eye(count)
        system[:count, count] = curve
        system[count, :count] = 1.0
        target = np.append(-wrong, -duals.sum())
        step = np.linalg.solve(system, target)
        duals += step[:count]
        bias += step[count]
        if float(np.abs(step).max()) < _CLOSE:
            break
    return duals, float(bias)
