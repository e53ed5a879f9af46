"""How long outputs will be, learned from those that ended.

One window of final output lengths per label (class of the request, bucket of its max_tokens), as in
LightLLM's Past-Future scheduler (ASPLOS'25, arXiv 2507.10150): the length of a running request is
the history's quantile among those longer than what it has already. Deterministic: quantiles, no
sampling.

This module does not know requests, time or memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Hashable

__all__ = ["LengthHistory"]


# tokens of an output of which nothing is known
_PRIOR = 256


class _Window:
    """The last ``size`` values, sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self.values: list[int] = []

    def add(self, value: int) -> None:
        self._order.append(value)
        insort(self.values, value)
        if len(self._order) > self._size:
            oldest = self._order.popleft()
            self.values.pop(bisect_right(self.values, oldest) - 1)


class LengthHistory:
    """Predicts output lengths by label, falling back to all labels, then to ``max_tokens``.

    Args:
        window: lengths remembered per label.
        min_samples: a label with fewer uses the history of all labels together.
    """

    def __init__(self, *, window: int = 200, min_samples: int = 8) -> None:
        self._window = window
        self._min_samples = min_samples
        self._labels: dict[Hashable, _Window] = {}
        self._all = _Window(2 * window)

    def observe(self, label: Hashable, num_output: int) -> None:
        """A request of this label ended by itself after ``num_output`` tokens."""
        self._labels.setdefault(label, _Window(self._window)).add(num_output)
        self._all.add(num_output)

    def predict(self, label: Hashable, num_output: int, max_tokens: int, q: float) -> int:
        """The q-quantile of the final length of a request with ``num_output`` tokens so far.

        Always in ``(num_output, max_tokens]``, and ``max_tokens`` while nothing is known.
        """
        known = self.known(label, num_output, max_tokens, q)
        return max_tokens if known is None else known

    def expect(self, label: Hashable, num_output: int, max_tokens: int, q: float) -> int:
        """Like ``predict``, but where nothing is known, or nothing so long was ever seen, twice
        what there is: few callers who allow thousands of tokens get them, and memory kept for all
        who might would lie idle."""
        known = self.known(label, num_output, max_tokens, q)
        return min(max_tokens, max(_PRIOR, 2 * num_output)) if known is None else known

    def known(self, label: Hashable, num_output: int, max_tokens: int, q: float) -> int | None:
        """Like ``predict``, but None while nothing is known, or nothing so long was ever seen."""
        window = self._labels.get(label)
        if window is None or len(window.values) < self._min_samples:
            window = self._all
        values = window.values
        first = bisect_right(values, num_output)
        longer = len(values) - first
        if len(values) < self._min_samples or longer == 0:
            return None
        return min(values[first + min(int(q * longer), longer - 1)], max_tokens)
