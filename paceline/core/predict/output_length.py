"""Forecasts of output lengths, learned from ended requests, and of the work that they make.

One window of final output lengths per label (class of the request, buckets of its prompt's length
and of its max_tokens), as in LightLLM's Past-Future scheduler (ASPLOS'25, arXiv 2507.10150): the
length of a running request is the history's quantile among those longer than what it has already.

This module does not know time or memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Final

from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["LengthHistory", "WorkEstimator"]

# tokens of an output without any history
_PRIOR: Final = 256
# before any measurement only the ratio counts: an output token costs a step of its own
_PROMPT_SECONDS: Final = 1e-4
_OUTPUT_SECONDS: Final = 2e-3


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
            del self.values[bisect_left(self.values, self._order.popleft())]


class LengthHistory:
    """The last ``window`` final output lengths of each label. A label with fewer than
    ``min_samples`` uses those of all labels together."""

    def __init__(self, *, window: int = 200, min_samples: int = 8) -> None:
        self._window, self._min_samples = window, min_samples
        self._labels: dict[Hashable, _Window] = {}
        self._all = _Window(2 * window)

    def observe(self, label: Hashable, num_output: int) -> None:
        """Learn that a request of this label ended by itself after ``num_output`` tokens."""
        self._labels.setdefault(label, _Window(self._window)).add(num_output)
        self._all.add(num_output)

    def known(self, label: Hashable) -> Sequence[int]:
        """Return the sorted lengths that apply to a label; none while there are few."""
        window = self._labels.get(label)
        if window is None or len(window.values) < self._min_samples:
            window = self._all
        return window.values if len(window.values) >= self._min_samples else ()


def longer_than(num_output: int, values: Sequence[int], q: float) -> int | None:
    """Return the q-quantile of the larger ones of the sorted ``values``; None if none is larger."""
    first = bisect_right(values, num_output)
    longer = len(values) - first
    return values[first + min(int(q * longer), longer - 1)] if longer else None


class WorkEstimator:
    """Combines the step-time model with the history of output lengths."""

    def __init__(self, step_time: StepTimeModel, lengths: LengthHistory) -> None:
        self._step_time, self._lengths = step_time, lengths

    def output_tokens(self, request: Request, q: float = 0.5) -> int:
        """Return the q-quantile of the final number of output tokens; max_tokens if unknown."""
        return self._quantile(request, q) or request.asked.sampling.max_tokens

    def expected_tokens(self, request: Request, q: float) -> int:
        """Like ``output_tokens``, but twice the present output if unknown: few outputs reach
        ``max_tokens``, and memory kept for that would lie idle."""
        most = request.asked.sampling.max_tokens
        return self._quantile(request, q) or min(most, max(_PRIOR, 2 * request.num_output_tokens))

    def least_left(self, requests: Iterable[Request], q: float) -> list[int]:
        """Return the q-quantile of each request's output tokens still to come; one if unknown."""
        known = self._lengths.known
        # many are alike: tokens still to come, by label and by tokens so far
        by_label: defaultdict[Hashable, dict[int, int]] = defaultdict(dict)
        left: list[int] = []
        for request in requests:
            num_output = request.num_tokens - request.num_prompt_tokens
            alike = by_label[request.label]
            more = alike.get(num_output)
            if more is None:
                length = longer_than(num_output, known(request.label), q)
                more = alike[num_output] = 1 if length is None else length - num_output
            most = request.max_total_tokens - request.num_tokens
            left.append(more if more < most else most)
        return left

    def spread(self, requests: Iterable[Request], parts: int, base: int) -> list[int]:
        """Return, for each request, ``parts`` equally likely numbers of output tokens still to
        come, each times ``base``, plus the total of an equal request, which is less than ``base``:
        tuples would take twice the memory. max_tokens if no length is known."""
        found: list[int] = []
        # by label: the known lengths, and their quantiles
        by_label: dict[Hashable, tuple[Sequence[int], Sequence[int]]] = {}
        odds = range(1, 2 * parts, 2)
        for request in requests:
            alike = by_label.get(request.label)
            if alike is None:
                known = self._lengths.known(request.label)
                quantiles = [known[odd * len(known) // (2 * parts)] for odd in odds if known]
                alike = by_label[request.label] = known, quantiles
            known, wholes = alike
            num_output, most = request.num_output_tokens, request.asked.sampling.max_tokens
            first = bisect_right(known, num_output)
            longer = len(known) - first
            for odd, whole in zip(odds, wholes or repeat(most), strict=False):
                last = known[first + odd * longer // (2 * parts)] if longer else most
                # written without calls, which would cost time with many running requests
                left = (last if last < most else most) - num_output
                found.append(left * base + (whole if whole < most else most))
        return found

    def _quantile(self, request: Request, q: float) -> int | None:
        """Return a quantile of its final length, 1 or more; None while none that long is known."""
        length = longer_than(request.num_output_tokens, self._lengths.known(request.label), q)
        return None if length is None else min(length, request.asked.sampling.max_tokens)

    def prompt_seconds(self, num_tokens: int) -> float:
        """Return the seconds to compute ``num_tokens`` prompt tokens in one step of their own."""
        if not self._step_time.ready:
            return _PROMPT_SECONDS * num_tokens
        return self._step_time.predict(StepShape().plus(0, max(2, num_tokens)))

    def seconds(self, request: Request) -> float:
        """Return the share of the engine's time that a new request needs."""
        output = self.output_tokens(request) - request.num_output_tokens
        prompt, new = request.num_prompt_tokens, request.num_new_tokens
        if not self._step_time.ready:
            return _PROMPT_SECONDS * new + _OUTPUT_SECONDS * output
        idle = self._step_time.predict(StepShape())
        row = self._step_time.predict(StepShape().plus(prompt + output // 2, 1)) - idle
        return self.prompt_seconds(new) + output * row
