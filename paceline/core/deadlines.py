"""Best-effort requests that are to be done by some time: who still can be, and do they press?

They come after whoever is not best effort, but before those that have missed what they were
promised and can gain nothing by being served sooner: not always, or a chat that is a little late
would wait behind all the work of a night, but when they would be late otherwise. And when not all
of them can be done in time, the fewest are left out (``triage``) rather than all being a little
late.

This module does not know what else fills a step: it takes the machine to be theirs alone. So nobody
is left out before it is certain, and they are taken to press while there is time to spare.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import merge
from itertools import islice
from typing import Final

from paceline.core.request import Band, Request
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.survey import Survey
from paceline.core.token_budget import TokenBudget
from paceline.core.triage import triage
from paceline.core.waiting import WaitingRoom
from paceline.core.work import WorkEstimator

__all__ = ["Deadlines"]

# of those that wait and run, the earliest: what is due later is looked at later
_MAX_LOOKED_AT: Final = 128
_STEPS_BETWEEN_LOOKS: Final = 8
# of predicted lengths: whoever is left out stays out, so work is taken to be short
_SURELY: Final = 0.25
# of predicted lengths where it does no harm to be careful
_LIKELY: Final = 0.7
# deadlines press if somebody would be late if all took so many times as long as predicted
_HASTE: Final = 2.0


class Deadlines:
    """Owned by ``Lateness``.

    Args:
        group: whose requests may be left out for one another.
    """

    def __init__(
        self,
        *,
        waiting: WaitingRoom,
        step_time: StepTimeModel,
        work: WorkEstimator,
        budget: TokenBudget,
        group: Callable[[Request], str],
    ) -> None:
        self._waiting = waiting
        self._step_time = step_time
        self._work = work
        self._budget = budget
        self._group = group
        self._steps_until_look = 0

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a best-effort request would miss its deadline if nothing else were computed."""
        deadline = request.slo.deadline
        if deadline is None or request.relegated or not self._step_time.ready:
            return False
        seconds = self._work.surely_left(request, _SURELY) * self._step_seconds(1)
        if request.num_uncomputed_tokens > 1:
            seconds += self._work.prompt_seconds(request.num_uncomputed_tokens)
        return now + seconds > request.arrival_time + deadline

    def look(self, survey: Survey, now: float) -> list[Request]:
        """Say whether deadlines press, and return who is to be left out, if a step that begins at
        ``now`` is next. Predictions move slowly: not at every step."""
        self._steps_until_look -= 1
        if self._steps_until_look > 0:
            return []
        running = sorted(
            (request.arrival_time + request.slo.deadline, request.order[1], request)
            for request in survey.best_effort
            if request.slo.deadline is not None and request.band is Band.PROMISED
        )
        if not running and not self._waiting.promised:
            self._waiting.pressing = False
            return []
        if not self._step_time.ready:
            return []
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        first = [
            entry[2] for entry in islice(merge(running, self._waiting.promised), _MAX_LOOKED_AT)
        ]
        per_token = self._budget.seconds_per_token(Survey())
        per_row = self._step_time.row_seconds(0)
        together = self._step_seconds(max(1, survey.num_running))

        def seconds(request: Request) -> float:
            # of the machine's time
            left = self._work.surely_left(request, _SURELY)
            return request.num_uncomputed_tokens * per_token + left * per_row

        def due(request: Request) -> float:
            # its steps come one after another, however little of each it takes
            deadline = request.slo.deadline
            assert deadline is not None, "it has one"
            left = self._work.surely_left(request, _SURELY)
            return request.arrival_time + deadline - left * (together - per_row)

        left_out = triage(first, now, seconds, self._group, due)
        gone = {request.request_id for request in left_out}
        end = now
        pressing = False
        for request in first:
            if request.request_id in gone:
                continue
            num_output = request.num_tokens - request.num_prompt_tokens
            if request.predicted_output <= num_output:
                request.predicted_output = self._work.expected_tokens(request, _LIKELY)
            left = request.predicted_output - num_output
            end += _HASTE * (request.num_uncomputed_tokens * per_token + left * per_row)
            deadline = request.slo.deadline
            assert deadline is not None, "it has one"
            if end + left * together > request.arrival_time + deadline:
                pressing = True
                break
        self._waiting.pressing = pressing
        return left_out

    def _step_seconds(self, num_rows: int) -> float:
        return self._step_time.predict(StepShape(0, 0.0, num_rows, 0))
