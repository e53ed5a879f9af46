"""Steps that were planned and whose results are not in: whose rows they have and when they end.

Steps run one after another, in the order in which they were planned.

This module does not know what else is planned, or what results mean for requests.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter
from typing import Final

from paceline.core.outputs import DRAFT_MODEL, SchedulerOutput, StepResult
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["StepsInFlight"]

# quantile of a step's time by its prediction: few steps take less
_EARLY: Final = 0.1
# seconds over which the share of ordinary requests is taken
_LATELY: Final = 10.0
_SECONDS: Final = itemgetter(3)


class StepsInFlight:
    """What steps took teaches the step-time model.

    Args:
        lead_s: so long before a step's likely end the next one is to be planned.
    """

    def __init__(self, step_time: StepTimeModel, lead_s: float) -> None:
        self._step_time = step_time
        self._lead_s = lead_s
        # with predicted seconds, and those of them in which guesses are made
        self._steps: deque[tuple[int, list[Request], StepShape, float, float]] = deque()
        # when the last of these steps is predicted to end
        self._busy_until = 0.0
        # predicted seconds of steps without best effort, forgotten exponentially, and as of when
        self._ordinary_seconds = 0.0
        self._as_of = 0.0
        # tokens computed in rows of several tokens, and in rows of one, by all steps whose results
        # came
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        # seconds of the steps that could be predicted
        self.predicted_seconds = 0.0
        self.actual_seconds = 0.0

    def starts(self, now: float) -> float:
        """When a step planned now is predicted to start: once those before it have ended."""
        return max(now, self._busy_until) if self._steps else now

    @property
    def plan_at(self) -> float:
        """See ``Scheduler.plan_at``."""
        if not self._steps or not self._step_time.ready:
            return -math.inf
        seconds = self._steps[-1][3]
        # most steps take at least so much of what was predicted
        surely = min(1.0, self._step_time.quantile(_EARLY))
        return self._busy_until - (1.0 - surely) * seconds - self._lead_s

    @property
    def ordinary_share(self) -> float:
        """The share of the time lately that ordinary requests needed; it may be above 1."""
        return self._ordinary_seconds / _LATELY

    def push(
        self,
        step_id: int,
        requests: list[Request],
        shape: StepShape,
        starts: float,
        seconds: float,
        ordinary_seconds: float | None,
        making: float = 0.0,
    ) -> None:
        """A step was planned; ``requests`` has one entry for each of its rows. It is predicted to
        take ``seconds``, of which the backend makes guesses for ``making``, and without best effort
        ``ordinary_seconds``; None: there is none."""
        self._steps.append((step_id, requests, shape, seconds, making))
        self._busy_until = starts + seconds
        self.note_ordinary(starts, seconds if ordinary_seconds is None else ordinary_seconds)

    def note_ordinary(self, starts: float, seconds: float) -> None:
        """Rows that are not best effort are predicted to take so long from ``starts`` on."""
        self._ordinary_seconds *= math.exp(min(0.0, self._as_of - starts) / _LATELY)
        self._ordinary_seconds += seconds
        self._as_of = starts

    def pop(self, plan: SchedulerOutput, result: StepResult, now: float) -> list[Request]:
        """The oldest step's result is in: learn from it, and return whose rows they were."""
        step_id, requests, shape, _, making = self._steps.popleft()
        assert step_id == plan.step_id == result.step_id, "results must come in plan order"
        planned = [len(token_ids) for _, token_ids, source in plan.drafts if source == DRAFT_MODEL]
        if planned and (unmade := sum(planned) - sum(len(ids) for _, ids in result.made)):
            # what was not made did not run
            shape = shape._replace(narrow_rows=shape.narrow_rows - unmade)
        self.num_prefill_tokens += shape.wide_tokens
        self.num_decode_tokens += shape.narrow_rows
        # the next one has just begun
        self._busy_until = now + sum(map(_SECONDS, self._steps))
        if result.elapsed > 0.0:
            ready = self._step_time.ready
            predicted = self._step_time.observe(shape, result.elapsed)
            if ready:
                self.predicted_seconds += predicted + making
                self.actual_seconds += result.elapsed + result.drafting
        return requests

    def num_rows(self, request: Request) -> int:
        """How many rows of these steps are ``request``'s."""
        return sum(r is request for step in self._steps for r in step[1])
