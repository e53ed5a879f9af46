"""When a newcomer would see its first token, and what became of what was said.

Asked at the door, between steps, and often: what runs is looked at once a step.

This module does not decide what becomes of the newcomer.
"""

from __future__ import annotations

from typing import Final

from paceline.core.memory.outlook import FirstTokenForecast
from paceline.core.queues.running import Running
from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request

__all__ = ["Prospects"]

# what holds requests up until one that runs ends
_FULL: Final = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))


class Prospects:
    """Owned by the scheduler.

    Args:
        max_num_seqs: requests running at once at most.
        tokens_per_step: prompt tokens of a step, before there was one.
    """

    def __init__(
        self,
        forecast: FirstTokenForecast,
        waiting: WaitingRoom,
        running: Running,
        *,
        max_num_seqs: int,
        tokens_per_step: int,
    ) -> None:
        self._forecast = forecast
        self._waiting = waiting
        self._running = running
        self._max_num_seqs = max_num_seqs
        # what held the head of the queue up in the last step, and its prompt tokens
        self.held_by: Reason | None = None
        self.tokens_per_step = tokens_per_step
        # prompt tokens running requests lacked at the last look; None: look again
        self._tokens_running: int | None = None

    def forget(self) -> None:
        """A step was planned, its result came, or a request ended: what was seen is out of date."""
        self._tokens_running = None

    def predict(self, request: Request) -> float | None:
        """Seconds to the first token if it were queued now; None while nothing is known."""
        if not self._forecast.ready:
            return None
        if self._tokens_running is None:
            running = self._running.requests
            full = bool(len(self._waiting)) and self.held_by in _FULL
            free = 0 if full else self._max_num_seqs - len(running)
            self._forecast.look(running, free_places=free, tokens_per_step=self.tokens_per_step)
            self._tokens_running = sum(
                max(0, r.num_uncomputed_tokens - 1) for r in running if not r.best_effort
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

    def learn(self, request: Request, now: float) -> None:
        """Its first token has come: take in what became of its forecast, where that was of what
        then happened."""
        if (
            request.history.predicted_ttft is not None
            and not request.best_effort
            and not request.aged
            and not request.num_preemptions
        ):
            self._forecast.learn(
                request.history.predicted_ttft / request.history.forecast_bias,
                now - request.asked.arrival_time,
            )
