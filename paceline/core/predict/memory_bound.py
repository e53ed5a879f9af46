"""The size at which a step's time stops being hidden, found from measured steps.

On some machines a step takes ``max(memory, arithmetic)``: reading the weights takes so long that
the arithmetic of the first couple of hundred tokens costs nothing (the roofline of Williams et al.,
CACM 2009). On others, its time is a sum of parts. ``Hinge`` tells the two apart: it adds
``max(0, tokens - k)`` to the step-time model's features, and accepts the best of a few k if

* it explains them clearly better than the model without it: by an F test far beyond what noise
  makes of the best of a few;
* and by its fit, tokens below k cost little compared with tokens above k.

This module does not know requests, budgets or the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import mul
from typing import Final

__all__ = ["Hinge"]

# tokens of a step where its time may begin to grow
_SIZES: Final = (
    64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
)  # fmt: skip
_RIDGE: Final = 1e-6
# brings the tokens of a busy step to about 1
_SCALE: Final = 1e-3
# observations between two fits, at first and later; a fit takes one per size, and one more
_EVERY: Final = 64
_LATER: Final = 256
_MANY: Final = 1024
# F statistic with one degree of freedom from which a size is accepted, and then kept
_BELIEVE: Final = 30.0
_KEEP: Final = 10.0
# relative error of the model that counts as zero
_EXACT: Final = 0.01
# a token below the hinge costs less than this share of one above it
_HIDDEN: Final = 0.25
# index of the model's feature that is in proportion to the tokens of wide rows
_PER_TOKEN: Final = 1


class Hinge:
    """Search for the hinge, fed by the step-time model, of ``size`` features, with its own sums.

    ``free_tokens`` is the result: up to this number of tokens in a step cost almost nothing in
    addition to the rows that it has anyway; 0 if no hinge was found.
    """

    def __init__(self, size: int) -> None:
        self.free_tokens = 0
        self._size = size
        # weighted sums of steps larger than _SIZES[i] and no larger than the next. With T their
        # tokens: features, T * features, T * T, seconds, T * seconds
        self._bins = [[0.0] * (2 * size + 3) for _ in _SIZES]
        # weighted sum of squared seconds: the number of observations, as weights are 1 / seconds^2
        self._count = 0.0
        # the fit in progress
        self._thinking: Iterator[None] = iter(())

    def observe(
        self, present: list[tuple[int, float]], weight: float, tokens: int, seconds: float
    ) -> None:
        """Learn from a step of ``tokens`` and ``seconds``; ``present`` are its nonzero features."""
        age = weight * seconds * seconds
        self._count += age
        index = bisect_left(_SIZES, tokens) - 1
        if index < 0:
            return
        sums, size = self._bins[index], self._size
        scaled = tokens * _SCALE
        for i, x_i in present:
            share = weight * x_i
            sums[i] += share
            sums[size + i] += share * scaled
        share = weight * scaled
        sums[-3] += share * scaled
        sums[-2] += weight * seconds
        sums[-1] += share * seconds

    def rescale(self, shrink: float) -> None:
        """Multiply all weights by ``shrink``."""
        self._count *= shrink
        self._bins = [[value * shrink for value in sums] for sums in self._bins]

    def look(self, number: int, gram: list[list[float]], moment: list[float]) -> None:
        """Continue the fit after observation ``number``, with the model's sums of the same ones,
        of which the newest weighs 1 / seconds^2 whenever a fit begins."""
        if number % (_EVERY if number < _MANY else _LATER) == 0:
            self._thinking = self._think([row.copy() for row in gram], moment.copy())
        next(self._thinking, None)

    def _think(self, gram: list[list[float]], moment: list[float]) -> Iterator[None]:
        """Fit these sums without and with one more feature, the tokens beyond each size in turn."""
        size, window = self._size, self._count
        total, beyond = [0.0] * len(self._bins[0]), []
        for sums in reversed(self._bins):
            total = [a + b for a, b in zip(total, sums, strict=True)]
            beyond.append(total)
        plain, _ = _fit(gram, moment, window)
        fits: list[tuple[float, list[float]]] = []
        for tokens, sums in zip(_SIZES, reversed(beyond), strict=True):
            yield
            k = tokens * _SCALE
            cross = [sums[size + i] - k * sums[i] for i in range(size)]
            # the first feature is 1
            square = sums[-3] - 2.0 * k * sums[size] + k * k * sums[0]
            whole = [[*row, extra] for row, extra in zip(gram, cross, strict=True)]
            whole.append([*cross, square])
            fits.append(_fit(whole, [*moment, sums[-1] - k * sums[-2]], window))
        error, best = min((error, index) for index, (error, _) in enumerate(fits))
        weights = fits[best][1]
        below, more = weights[_PER_TOKEN], weights[-1]
        gain = (plain - error) / (max(error, 0.0) / window + _EXACT**2)
        hidden = more > 0.0 and below <= _HIDDEN * (below + more)
        believed = gain > (_KEEP if self.free_tokens else _BELIEVE)
        self.free_tokens = _SIZES[best] if hidden and believed else 0


def _fit(gram: list[list[float]], moment: list[float], count: float) -> tuple[float, list[float]]:
    """Return the sum of squared relative errors and the weights of a least-squares fit with weights
    of 0 or more. A feature with a negative weight is left out, the worst first."""
    ridge = _RIDGE * gram[0][0]
    used = [i for i in range(len(gram)) if gram[i][i] > ridge]
    weights = [0.0] * len(gram)
    while used:
        solution = _solve([[gram[i][j] + (ridge if i == j else 0.0) for j in used] for i in used],
                          [moment[i] for i in used])  # fmt: skip
        least = min(range(len(used)), key=solution.__getitem__)
        if solution[least] >= 0.0:
            for i, value in zip(used, solution, strict=True):
                weights[i] = value
            break
        del used[least]
    error = count - 2.0 * sum(map(mul, weights, moment))
    for row, weight in zip(gram, weights, strict=True):
        if weight:
            error += weight * sum(map(mul, row, weights))
    return error, weights


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve by Gauss; the matrix is positive definite, so pivots are not needed. Destroys both."""
    size = len(right)
    for k in range(size):
        row, inverse = matrix[k], 1.0 / matrix[k][k]
        for i in range(k + 1, size):
            factor = matrix[i][k] * inverse
            if factor:
                lower = matrix[i]
                for j in range(k, size):
                    lower[j] -= factor * row[j]
                right[i] -= factor * right[k]
    solution = [0.0] * size
    for i in range(size - 1, -1, -1):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - rest) / matrix[i][i]
    return solution
