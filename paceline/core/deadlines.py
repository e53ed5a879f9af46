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
from itertools import compress
from typing import Final

from paceline.core.request import Band, Request
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.survey import Survey
from paceline.core.token_budget import TokenBudget
from paceline.core.triage import all_in_time, triage
from paceline.core.waiting import WaitingRoom
from paceline.core.work import WorkEstimator

__all__ = ["Deadlines"]

# of those that wait and run, the earliest: what is due later is looked at later
_MAX_LOOKED_AT: Final = 128
_STEPS_BETWEEN_LOOKS: Final = 8
# left out at once, or the step would wait for it; if there are more, the next look comes sooner
_MAX_LEFT_OUT: Final = 32
_STEPS_TO_THE_REST: Final = 2
# of predicted lengths: who is left out would be late rather than not
_QUANTILE: Final = 0.5
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
        latest = request.arrival_time + deadline - self._left(request) * self._step_seconds(1)
        if request.num_uncomputed_tokens <= 1:
            return now > latest
        if now + self._work.prompt_seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # what is cached of its prompt takes no time: looked for only if that matters
        return now + self._work.prompt_seconds(self._waiting.num_lacking(request)) > latest

    def look(self, survey: Survey, now: float) -> list[Request]:
        """Say whether deadlines press, and return who is to be left out, if a step that begins at
        ``now`` is next: ``_MAX_LEFT_OUT`` at most. Predictions move slowly: not at every step."""
        self._steps_until_look -= 1
        if self._steps_until_look > 0:
            return []
        running = [
            (request.arrival_time + request.slo.deadline, request.order[1], request)
            for request in survey.best_effort
            if request.slo.deadline is not None and request.band is Band.PROMISED
        ]
        if not running and not self._waiting.promised:
            self._waiting.pressing = False
            return []
        if not self._step_time.ready:
            return []
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        # those that wait are in order: sorting is quick
        first = sorted(self._waiting.promised[:_MAX_LOOKED_AT] + running)[:_MAX_LOOKED_AT]
        per_token = self._budget.seconds_per_token(Survey())
        per_row = self._step_time.row_seconds(0)
        # a step of rows alone, and one filled up with prompts; how long these last
        short = self._step_seconds(max(1, survey.num_running))
        beside = self._step_time.predict(survey.base) if survey.ordinary else 0.0
        full = beside + self._budget.full_step_seconds
        filling = self._waiting.num_new_tokens * per_token
        # of each, seconds of the machine's time, and when it must have been given these: tokens
        # come one a step, and what is between them is not its own
        seconds: list[float] = []
        latest: list[float] = []
        surely_left = self._work.surely_left
        for due, _, request in first:
            left = surely_left(request, _QUANTILE)
            own = left * per_row
            between = max(0.0, min(left * full, left * short + filling) - own)
            seconds.append(own + request.num_lacking_tokens * per_token)
            latest.append(due - between)
        jobs = [entry[2] for entry in first]
        left_out = triage(jobs, now, seconds, latest, self._group)
        if left_out:
            gone = {request.request_id for request in left_out}
            stays = [request.request_id not in gone for request in jobs]
            seconds, latest = list(compress(seconds, stays)), list(compress(latest, stays))
        if len(left_out) > _MAX_LEFT_OUT:
            del left_out[_MAX_LEFT_OUT:]
            self._steps_until_look = _STEPS_TO_THE_REST
        self._waiting.pressing = not all_in_time(now, [_HASTE * own for own in seconds], latest)
        return left_out

    def _left(self, request: Request) -> int:
        return self._work.surely_left(request, _QUANTILE)

    def _step_seconds(self, num_rows: int) -> float:
        return self._step_time.predict(StepShape(0, 0.0, num_rows, 0))
