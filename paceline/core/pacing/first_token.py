"""When a request that arrives now would see its first token, and what became of what was said.

Asked at the door, between steps, and often: running requests are looked at once a step.

This module does not decide what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from paceline.core.predict.step_time import StepShape
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Forecast, Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["FirstTokenForecast"]

# levels of priority that are told apart, on either side
_LEVELS: Final = 4
# times or part of what was said, at most
_MOST_BIAS: Final = 8.0
# what holds requests up until a running one ends
_FULL: Final = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))


class FirstTokenForecast:
    """Predicts the time to first token of a request that would be queued now.

    What it waits for is prompt tokens computed before its own, and a place that a running request
    gives back when it ends. The ratio of what came to what was said is learned for each kind of
    request, so that what the model leaves out corrects itself: those that come later and go first.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # what came by what was said, lately; by kind of request
        self.bias: dict[Hashable, float] = {}
        # the plan that was looked at last, and what was seen of it: requests that could run beside
        # the others, prompt tokens that a step takes, its narrow rows, prompt tokens that ordinary
        # requests lack, and how many output tokens running ones will still have, fewest first;
        # None until asked for
        self._seen = -1
        self._free_places = 0
        self._tokens_per_step = 2
        self._base = StepShape()
        self._num_lacking = 0
        self._left: list[int] | None = None

    def note(self, request: Request) -> float | None:
        """Write down with a newcomer what is predicted for it, and return that."""
        history = request.history
        history.forecast = self._forecast(request)
        history.predicted_ttft = self._seconds(history.forecast)
        return history.predicted_ttft

    def predict(self, request: Request) -> float | None:
        """Seconds to the first token if it were queued now; None while nothing was measured."""
        return self._seconds(self._forecast(request))

    def _seconds(self, forecast: Forecast | None) -> float | None:
        return None if forecast is None else self.bias.get(forecast.kind, 1.0) * forecast.seconds

    def _forecast(self, request: Request) -> Forecast | None:
        state, last = self._state, self._state.last
        for forecast, actual in last.first_tokens:
            self._learn(forecast, actual)
        last.first_tokens.clear()
        if not state.step_time.ready:
            return None
        if self._seen != last.version:
            self._seen = last.version
            self._look()
        requests_ahead, tokens_ahead = state.waiting.ahead_of(request)
        predict, step = state.step_time.predict, self._tokens_per_step
        full_step = predict(self._base.plus(0, step))
        ahead = (self._num_lacking + tokens_ahead) / step * full_step
        num_steps = -(-request.num_new_tokens // step)
        rest = max(2, request.num_new_tokens - (num_steps - 1) * step)
        prompt = (num_steps - 1) * full_step + predict(self._base.plus(0, rest))
        seconds = max(ahead, self._place_in(requests_ahead)) + prompt
        priority = max(-_LEVELS, min(_LEVELS, request.asked.priority))
        late = seconds > request.late_after
        return Forecast((request.tier, priority, late), seconds, late)

    def _place_in(self, requests_ahead: int) -> float:
        """Seconds until a running request ends and gives its place to a newcomer, after so many."""
        missing = requests_ahead + 1 - self._free_places
        state, running = self._state, self._state.running.requests
        if missing <= 0 or not running:
            return 0.0
        if self._left is None:
            self._left = sorted(state.work.output_tokens(r) - r.num_output_tokens for r in running)
        # those that will run then end too: rounds of the same lengths
        rounds, index = divmod(missing - 1, len(self._left))
        steps = self._left[index] + rounds * sum(self._left) / len(self._left)
        return steps * max(state.step_time.predict(self._base), 1e-9)

    def _look(self) -> None:
        """Take in what runs. Good until the next plan, result or end of a request."""
        state, running = self._state, self._state.running.requests
        full = len(state.waiting) > 0 and state.last.held_by in _FULL
        self._free_places = 0 if full else state.config.max_num_seqs - len(running)
        self._tokens_per_step = max(2, state.last.chunk_tokens)
        narrow = [r.num_computed_tokens for r in running if r.num_uncomputed_tokens <= 1]
        self._base = StepShape(0, 0.0, len(narrow), sum(narrow))
        self._num_lacking = sum(
            max(0, r.num_uncomputed_tokens - 1) for r in running if r.tier is Tier.ORDINARY
        )
        self._left = None

    def _learn(self, forecast: Forecast, actual: float) -> None:
        """Take in what became of a forecast."""
        if forecast.seconds > 0.0:
            bias = self.bias.get(forecast.kind, 1.0)
            # bounded against outliers
            ratio = min(_MOST_BIAS, max(1.0 / _MOST_BIAS, actual / forecast.seconds))
            self.bias[forecast.kind] = bias + 0.05 * (ratio - bias)
