"""Best-effort requests that are to be done by some time: who still can be, and do they press?

They come after whoever is not best effort, but before those that have missed what they were
promised and can gain nothing by being served sooner: not always, or a chat that is a little late
would wait behind all the work of a night, but when they would be late otherwise. And when not all
of them can be done in time, the fewest are left out (``triage``) rather than all being a little
late.

What the others need comes out of their time: as much as it was lately, for a while, and nothing
after that, since work of a night is not to be given up for the load of an evening. Who is left out
and waits is asked about again, and comes back when there is time to spare.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, compress
from typing import Final, NamedTuple

from paceline.core.pacing.budget import PACE_SHARE, TokenBudget
from paceline.core.pacing.tpot_guard import least_target
from paceline.core.pacing.triage import all_in_time, triage
from paceline.core.pacing.view import Survey
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier

__all__ = ["Deadlines"]

# of those that wait and run, the earliest: what is due later is looked at later
_MAX_LOOKED_AT: Final = 128
_STEPS_BETWEEN_LOOKS: Final = 8
# left out at once, or the step would wait for it; if there are more, the next look comes sooner
_MAX_LEFT_OUT: Final = 32
_STEPS_TO_THE_REST: Final = 2
# of predicted lengths: who is left out would be late rather than not
_QUANTILE: Final = 0.5
# deadlines press if somebody would be late if all took so many times as long as predicted, and one
# of those that stream is not to wait any more if it would be if its steps did
_HASTE: Final = 2.0
# seconds: over so many it is known what share of the time others take, and for so many to come
# taken for granted
_LATELY: Final = 10.0
_AHEAD: Final = 60.0
# of the time that the pace of others leaves: the rest is for their prompts
_HURRIED_SHARE: Final = 0.25


class Verdict(NamedTuple):
    """Who changes places."""

    leave: list[Request]
    # with the keys they had
    come_back: list[tuple[float, Request]]


_NOBODY: Final = Verdict([], [])


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
        # seconds that the others took lately, as of a time
        self._taken = 0.0
        self._as_of = 0.0
        # those that run and are not to sit steps out once they stream, the earliest due first
        self._pressed: list[Request] = []
        # those left out who may come back, with their keys before that
        self._left_out: dict[str, tuple[float, Request]] = {}

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a best-effort request would miss its deadline if nothing else were computed."""
        deadline = request.targets.deadline
        if deadline is None or request.tier is Tier.RELEGATED or not self._step_time.ready:
            return False
        latest = request.asked.arrival_time + deadline - self._left(request) * self._step_seconds(1)
        if request.num_uncomputed_tokens <= 1:
            return now > latest
        if now + self._work.prompt_seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # what is cached of its prompt takes no time: looked for only if that matters
        return now + self._work.prompt_seconds(self._waiting.num_lacking(request)) > latest

    def others_take(self, now: float, seconds: float) -> None:
        """A step that begins at ``now`` is predicted to last so long for those alone that are not
        best effort."""
        self._taken = self._taken * math.exp(min(0.0, self._as_of - now) / _LATELY) + seconds
        self._as_of = now

    def look(self, survey: Survey, now: float) -> Verdict:
        """Say whether deadlines press, and return who is to be left out, if a step that begins at
        ``now`` is next, ``_MAX_LEFT_OUT`` at most, and who may come back. Predictions move slowly:
        not at every step."""
        self._steps_until_look -= 1
        if self._steps_until_look > 0:
            return _NOBODY
        running = [
            (request.asked.arrival_time + request.targets.deadline, request.order[1], request)
            for request in survey.best_effort
            if request.targets.deadline is not None and request.tier is Tier.PROMISED
        ]
        left_before = self._that_may_come_back(now)
        if not running and not self._waiting.promised and not left_before:
            self._waiting.pressing = False
            self._pressed = []
            return _NOBODY
        if not self._step_time.ready:
            return _NOBODY
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        first = self._waiting.promised[:_MAX_LOOKED_AT]
        if running:
            # the others are in order: sorting is quick
            first = sorted(first + running)[:_MAX_LOOKED_AT]
        if left_before:
            first = sorted(first + left_before)
        per_token = self._budget.seconds_per_token(Survey())
        per_row = self._step_time.row_seconds(0)
        # a step of rows alone, and one filled up with prompts; how long these last
        short = self._step_seconds(max(1, survey.num_running))
        beside = self._step_time.predict(survey.base) if survey.ordinary else 0.0
        full = beside + self._budget.full_step_seconds
        filling = self._waiting.num_new_tokens * per_token
        # share of the time to come that others are taken to need
        taken = min(1.0, self._taken / _LATELY)
        # of each, seconds of the machine's time, and when it must have been given these: tokens
        # come one a step, and what is between them is not its own
        seconds: list[float] = []
        latest: list[float] = []
        jobs = [entry[2] for entry in first]
        lefts = self._work.surely_left_each(jobs, _QUANTILE)
        # a loop of hundreds in a step that does all the rest too: no more calls than it needs
        for (due, _, request), left in zip(first, lefts, strict=True):
            own = left * per_row
            between = min(left * full, left * short + filling) - own
            start = due - between if between > 0.0 else due
            own += request.num_lacking_tokens * per_token
            if left_before and request.request_id in self._left_out:
                # to and fro would cost others their time
                own *= _HASTE
            seconds.append(own)
            ahead = start - now
            latest.append(start - taken * min(ahead, _AHEAD) if ahead > 0.0 else start)
        late = triage(jobs, now, seconds, latest, self._group)
        gone = {request.request_id for request in late}
        stays = [request.request_id not in gone for request in jobs]
        left_out = [request for request in late if request.request_id not in self._left_out]
        if len(left_out) > _MAX_LEFT_OUT:
            del left_out[_MAX_LEFT_OUT:]
            self._steps_until_look = _STEPS_TO_THE_REST
        back = [
            self._left_out.pop(r.request_id) for _, _, r in left_before if r.request_id not in gone
        ]
        for request in left_out[: _MAX_LOOKED_AT - len(self._left_out)]:
            if request.status is RequestStatus.WAITING:
                self._left_out[request.request_id] = request.order[0], request
        self._pressed = [
            request
            for (due, _, request), left, stay in zip(first, lefts, stays, strict=True)
            if stay
            and request.status is RequestStatus.RUNNING
            and now + _HASTE * (left + _STEPS_BETWEEN_LOOKS) * full > due
        ]
        self._waiting.pressing = not all_in_time(
            now, [_HASTE * own for own in compress(seconds, stays)], list(compress(latest, stays))
        )
        return Verdict(left_out, back)

    def rest(self) -> None:
        """Nobody is left, nor to be kept in memory."""
        self._pressed = []

    def hurried(self, survey: Survey) -> list[Request]:
        """Those that run, stream, and would be late if they sat steps out, the earliest first and
        as far as the pace of the others, their prompts and the length of steps allow."""
        those = [
            request
            for request in self._pressed
            if request.status is RequestStatus.RUNNING
            and request.best_effort
            and request.num_uncomputed_tokens <= 1
        ]
        if not those:
            return those
        rows, before = survey.narrow_rows, survey.narrow_keys
        own = self._step_time.predict(StepShape(0, 0.0, rows, before)) if rows else 0.0
        # as any best effort: so much longer than the rows of others alone, or so long without them
        most = own + self._budget.best_effort_seconds
        tightest = self._tightest(survey)
        if tightest < math.inf:
            most = min(most, own + _HURRIED_SHARE * (PACE_SHARE * tightest - own))
        if most == math.inf:
            return those
        keys = list(accumulate(request.num_computed_tokens for request in those))

        def seconds(num: int) -> float:
            return self._step_time.predict(StepShape(0, 0.0, rows + num, before + keys[num - 1]))

        return those[: bisect_right(range(1, len(those) + 1), most, key=seconds)]

    def _tightest(self, survey: Survey) -> float:
        """The tightest TPOT target among paced requests that somebody could meet."""
        least = least_target(self._step_time)
        if survey.tightest >= least:
            return survey.tightest
        targets = (request.targets.tpot or 0.0 for request in survey.paced)
        return min((target for target in targets if target >= least), default=math.inf)

    def _that_may_come_back(self, now: float) -> list[tuple[float, int, Request]]:
        """Those left out that still wait in that band, as ``promised`` has the others."""
        found = []
        for name, (_, request) in list(self._left_out.items()):
            deadline = request.targets.deadline
            if (
                deadline is None
                or now > request.asked.arrival_time + deadline
                or request.status is not RequestStatus.WAITING
                or request.tier is not Tier.RELEGATED
                or request.num_pending_tokens
            ):
                del self._left_out[name]
            else:
                found.append((request.asked.arrival_time + deadline, request.order[1], request))
        return found

    def _left(self, request: Request) -> int:
        return self._work.surely_left(request, _QUANTILE)

    def _step_seconds(self, num_rows: int) -> float:
        return self._step_time.predict(StepShape(0, 0.0, num_rows, 0))
