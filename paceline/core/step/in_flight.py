"""Steps that were planned and whose results are not in: their requests and predicted ends.

Steps run one after another, in the order in which they were planned.

This module does not know about further plans, or what results mean for requests.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter
from typing import Final

from paceline.core.outputs import DRAFT_MODEL, SchedulerOutput, StepResult
from paceline.core.predict.step_time import (
    NO_ADAPTERS,
    AdapterWork,
    StepShape,
    StepTimeModel,
)
from paceline.core.request import Request

__all__ = ["StepsInFlight"]

# quantile of actual / predicted step time: few steps take less
_EARLY: Final = 0.1
# seconds over which the share of ordinary requests is taken
_LATELY: Final = 10.0
_SECONDS: Final = itemgetter(3)


class StepsInFlight:
    """Steps in order; their measured times train the step-time model. The next one is to be planned
    ``lead_s`` seconds before the likely end of the last."""

    def __init__(self, step_time: StepTimeModel, lead_s: float) -> None:
        self._step_time, self._lead_s = step_time, lead_s
        # with predicted seconds, how many of them go into making draft tokens, and the work of its
        # adapters; None: it did not run as planned
        self._steps: deque[
            tuple[int, list[Request], StepShape, float, float, AdapterWork | None]
        ] = deque()
        # when the last of these steps is predicted to end
        self._busy_until = 0.0
        # predicted seconds of steps without best effort, exponentially decayed, and their time
        self._ordinary_seconds = self._as_of = 0.0
        # tokens computed in rows of several tokens, and in rows of one, by all steps with results
        self.num_prefill_tokens = self.num_decode_tokens = 0
        # seconds of the steps that could be predicted
        self.predicted_seconds = self.actual_seconds = 0.0

    def starts(self, now: float) -> float:
        """Return when a step planned now is predicted to start: when those before it have ended."""
        return max(now, self._busy_until) if self._steps else now

    @property
    def plan_at(self) -> float:
        """Time of ``Scheduler.plan_at``."""
        if not self._steps or not self._step_time.ready:
            return -math.inf
        seconds = self._steps[-1][3]
        # most steps take at least this share of their predicted time
        surely = min(1.0, self._step_time.quantile(_EARLY))
        return self._busy_until - (1.0 - surely) * seconds - self._lead_s

    @property
    def ordinary_share(self) -> float:
        """Share of recent time that ordinary requests needed; it may be above 1."""
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
        adapters: AdapterWork = NO_ADAPTERS,
    ) -> None:
        """Add a planned step; ``requests`` has one entry per row. It is predicted to take
        ``seconds``, ``making`` of them for draft tokens that the backend makes, and
        ``ordinary_seconds`` without its best-effort rows; None: it has none."""
        self._steps.append((step_id, requests, shape, seconds, making, adapters))
        self._busy_until = starts + seconds
        self.note_ordinary(starts, seconds if ordinary_seconds is None else ordinary_seconds)

    def note_ordinary(self, starts: float, seconds: float) -> None:
        """Count predicted seconds, from ``starts`` on, of rows that are not best effort."""
        self._ordinary_seconds *= math.exp(min(0.0, self._as_of - starts) / _LATELY)
        self._ordinary_seconds += seconds
        self._as_of = starts

    def newest(self, plan: SchedulerOutput) -> list[Request]:
        """Return the requests of the rows of the step that was planned last."""
        step_id, requests, *_ = self._steps[-1]
        assert step_id == plan.step_id, "a step is amended before the next one is planned"
        return requests

    def amend(self, requests: list[Request], shape: StepShape) -> None:
        """Replace the rows of the step that was planned last, whose time is not learned then: what
        kept the others out took time as well. Without rows, the step is dropped."""
        step_id, _, _, seconds, _, _ = self._steps.pop()
        self._busy_until -= seconds
        if requests:
            seconds = self._step_time.predict(shape)
            self._steps.append((step_id, requests, shape, seconds, 0.0, None))
            self._busy_until += seconds

    def pop(self, plan: SchedulerOutput, result: StepResult, now: float) -> list[Request]:
        """Take in the oldest step's result: learn from it, and return the requests of its rows."""
        step_id, requests, shape, _, making, adapters = self._steps.popleft()
        assert step_id == plan.step_id == result.step_id, "results must come in plan order"
        planned = [len(token_ids) for _, token_ids, source in plan.drafts if source == DRAFT_MODEL]
        if planned and (unmade := sum(planned) - sum(len(ids) for _, ids in result.made)):
            # drafts that were not made were not verified
            shape = shape._replace(narrow_rows=shape.narrow_rows - unmade)
        self.num_prefill_tokens += shape.wide_tokens
        self.num_decode_tokens += shape.narrow_rows
        # the next step has just begun
        self._busy_until = now + sum(map(_SECONDS, self._steps))
        if adapters is not None and result.elapsed > 0.0:
            ready = self._step_time.ready
            predicted = self._step_time.observe(shape, result.elapsed, adapters)
            if ready:
                self.predicted_seconds += predicted + making
                self.actual_seconds += result.elapsed + result.drafting
        return requests

    def num_rows(self, request: Request) -> int:
        """Return how many rows of these steps are ``request``'s."""
        return sum(r is request for step in self._steps for r in step[1])
