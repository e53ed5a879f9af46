"""When a request that arrives now would see its first token, and what became of what was said.

Asked at the door, between steps, and often: running requests are looked at once a step.

This module does not decide what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.predict.output_length import WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["ArrivalForecast", "FirstTokenForecast"]

# what holds requests up until a running one ends
_FULL: Final = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))


class FirstTokenForecast:
    """Predicts the time to first token of a request that would be queued now.

    What it waits for is prompt tokens computed before its own, and a place that a running request
    gives back when it ends. The ratio of what came to what was said is learned, so a bias of the
    model corrects itself.
    """

    def __init__(self, step_time: StepTimeModel, work: WorkEstimator) -> None:
        self._step_time = step_time
        self._work = work
        # what came by what was said, lately
        self.bias = 1.0
        self._base = StepShape()
        self._running: Sequence[Request] = ()
        # output tokens that those running will still have, fewest first; None until asked for
        self._left: list[int] | None = None
        self._free_places = 0
        self._tokens_per_step = 1

    @property
    def ready(self) -> bool:
        """Whether enough was measured to say anything."""
        return self._step_time.ready

    def look(self, running: Sequence[Request], *, free_places: int, tokens_per_step: int) -> None:
        """Take in what runs. Good until the next step or end of a request.

        Args:
            free_places: requests that could run beside it now.
            tokens_per_step: prompt tokens a step takes beside the running rows.
        """
        narrow = [r.num_computed_tokens for r in running if r.num_uncomputed_tokens <= 1]
        self._base = StepShape(0, 0.0, len(narrow), sum(narrow))
        self._running = running
        self._left = None
        self._free_places = free_places
        self._tokens_per_step = max(2, tokens_per_step)

    def seconds(
        self, num_new_tokens: int, *, tokens_ahead: int, requests_ahead: int
    ) -> float | None:
        """Seconds from now to the first token; None while nothing was measured.

        Args:
            num_new_tokens: of the request, prompt tokens that are not cached.
            tokens_ahead: prompt tokens of running and waiting requests to be computed before.
            requests_ahead: waiting requests that will be admitted before.
        """
        predict = self._step_time.predict
        if not self.ready:
            return None
        base, step = self._base, self._tokens_per_step
        idle_step = predict(base)
        full_step = predict(base.plus(0, step))
        ahead = tokens_ahead / step * full_step
        own = -(-num_new_tokens // step)
        rest = num_new_tokens - (own - 1) * step
        prompt = (own - 1) * full_step + predict(base.plus(0, max(2, rest)))
        wait = 0.0
        missing = requests_ahead + 1 - self._free_places
        left = self._tokens_left() if missing > 0 else []
        if left:
            # those that will run then end too: rounds of the same lengths
            rounds, index = divmod(missing - 1, len(left))
            wait = (left[index] + rounds * sum(left) / len(left)) * max(idle_step, 1e-9)
        return self.bias * (max(ahead, wait) + prompt)

    def _tokens_left(self) -> list[int]:
        if self._left is None:
            self._left = sorted(
                self._work.output_tokens(r) - (r.num_tokens - r.num_prompt_tokens)
                for r in self._running
            )
        return self._left

    def learn(self, raw: float, actual: float) -> None:
        """Take in what became of a forecast; ``raw`` is it divided by the bias it was made with."""
        if raw > 0.0:
            # bounded against outliers
            ratio = min(4.0, max(0.25, actual / raw))
            self.bias += 0.05 * (ratio - self.bias)


class ArrivalForecast:
    """The forecast of a scheduler's requests. Owned by the door."""

    def __init__(self, state: SchedulerState) -> None:
        self._forecast = FirstTokenForecast(state.step_time, state.work)
        self._waiting = state.waiting
        self._running = state.running.requests
        self._max_num_seqs = state.config.max_num_seqs
        self._last = state.last
        # the plan that was looked at last, and prompt tokens that running requests lacked then
        self._seen = -1
        self._tokens_running = 0

    def predict(self, request: Request) -> float | None:
        """Seconds to the first token if it were queued now; None while nothing is known."""
        last = self._last
        for predicted, bias, actual in last.first_tokens:
            self._forecast.learn(predicted / bias, actual)
        last.first_tokens.clear()
        if not self._forecast.ready:
            return None
        if self._seen != last.version:
            self._seen, running = last.version, self._running
            full = bool(len(self._waiting)) and last.held_by in _FULL
            free = 0 if full else self._max_num_seqs - len(running)
            self._forecast.look(running, free_places=free, tokens_per_step=last.chunk_tokens)
            self._tokens_running = sum(
                max(0, r.num_uncomputed_tokens - 1) for r in running if r.tier is Tier.ORDINARY
            )
        requests_ahead, tokens_ahead = self._waiting.ahead_of(request)
        return self._forecast.seconds(
            request.num_new_tokens,
            tokens_ahead=self._tokens_running + tokens_ahead,
            requests_ahead=requests_ahead,
        )

    def note(self, request: Request) -> None:
        """Write down with a newcomer what is predicted for it."""
        request.history.predicted_ttft = self.predict(request)
        request.history.forecast_bias = self._forecast.bias
