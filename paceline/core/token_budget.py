"""How many tokens the next step may compute.

``FixedTokenBudget`` always says ``max_num_batched_tokens``. ``AdaptiveTokenBudget`` spends the
slack the running requests leave (the dynamic chunk of Niyama, arXiv 2503.22562): the next token of
a paced request is due at a known time, so a step may take until the earliest of these, and no
longer. Requests that are ahead of their schedule thereby lend their time to prompts that wait.

This module does not know the queue, memory or the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.core.request import Request
from paceline.core.step_time import StepShape, StepTimeModel

__all__ = ["AdaptiveTokenBudget", "Allowance", "FixedTokenBudget", "TokenBudget"]


class Allowance(NamedTuple):
    """What one step may spend."""

    # at least one for each running request and one more
    tokens: int
    # predicted seconds the step may take; best-effort rows stay out of a step beyond it
    seconds: float = math.inf


class TokenBudget(Protocol):
    """Asked once a step, before anything is planned."""

    def allow(self, running: Sequence[Request], now: float) -> Allowance:
        """What the next step may spend."""
        ...


class FixedTokenBudget:
    """The same every step."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._allowance = Allowance(max_num_batched_tokens)

    def allow(self, running: Sequence[Request], now: float) -> Allowance:
        return self._allowance


class AdaptiveTokenBudget:
    """The largest chunk whose predicted time fits the slack of those running.

    Without targets among the running requests it says ``max_num_batched_tokens``, like a fixed one.

    Args:
        max_num_batched_tokens: never more than this.
        tile: chunks are multiples of it, where the matrix kernels are efficient.
        floor: a chunk of this size is allowed however late the running requests are, or new
            requests would starve.
        quantile: of actual / predicted time that must fit; 0.9 is late once in ten steps.
    """

    def __init__(
        self,
        model: StepTimeModel,
        max_num_batched_tokens: int,
        *,
        tile: int = 32,
        floor: int = 32,
        quantile: float = 0.9,
    ) -> None:
        self._model = model
        self._most = max_num_batched_tokens
        self._tile = tile
        self._floor = floor
        self._quantile = quantile

    def allow(self, running: Sequence[Request], now: float) -> Allowance:
        if not self._model.ready:
            return Allowance(self._most)
        due = math.inf
        narrow_rows = narrow_keys = 0
        wide_start = 0
        for request in running:
            if request.num_uncomputed_tokens > 1:
                wide_start = max(wide_start, request.num_computed_tokens)
                continue
            if request.slo.best_effort:
                continue
            narrow_rows += 1
            narrow_keys += request.num_computed_tokens
            if request.slo.tpot is not None and request.first_token_time is not None:
                num_output = request.num_tokens - request.num_prompt_tokens
                due = min(
                    due,
                    request.slo.next_token_due(
                        request.arrival_time,
                        request.first_token_time,
                        num_output + request.num_pending_tokens,
                    ),
                )
        if due == math.inf:
            return Allowance(self._most)
        allowed = (due - now) / max(1.0, self._model.quantile(self._quantile))
        base = StepShape(0, 0.0, narrow_rows, narrow_keys)
        low = self._floor // self._tile
        high = max(low, (self._most - len(running)) // self._tile)
        if self._model.predict(base.plus(wide_start, high * self._tile)) <= allowed:
            return Allowance(self._most, allowed)
        while low < high:
            middle = (low + high + 1) // 2
            if self._model.predict(base.plus(wide_start, middle * self._tile)) <= allowed:
                low = middle
            else:
                high = middle - 1
        return Allowance(
            min(self._most, len(running) + max(low * self._tile, self._floor)), allowed
        )
