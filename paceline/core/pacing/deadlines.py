"""Best-effort requests with a deadline: which can still be done in time, and do they press?

They come after ordinary requests, but before those that have missed their targets and gain nothing
by being served sooner: only when they would be late otherwise, or a chat that is a little late
would wait behind all the work of a night. And when not all of them can be done in time, the fewest
are left out (``triage``) rather than all being a little late.

What ordinary requests need comes out of their time: as much as it was lately, for a while, and
nothing after that, since work of a night is not to be given up for the load of an evening. Requests
that were left out and wait are asked about again, and come back when there is time to spare.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate, compress
from typing import Final, NamedTuple

from paceline.core.pacing.budget import StepBudget
from paceline.core.pacing.tpot_guard import PACE_SHARE, least_target
from paceline.core.pacing.triage import all_in_time, triage
from paceline.core.pacing.view import NO_VIEW, RunningView
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Deadlines"]

# of those that wait and run, the earliest: what is due later is looked at later
_MAX_LOOKED_AT: Final = 128
_STEPS_BETWEEN_LOOKS: Final = 8
# left out at once, or the step would wait for it; if there are more, the next look comes sooner
_MAX_LEFT_OUT: Final = 32
_STEPS_TO_THE_REST: Final = 2
# of predicted lengths: a request that is left out would be late rather than not
_QUANTILE: Final = 0.5
# deadlines press if a request would be late if all took so many times as long as predicted, and a
# request that streams must run if it would be late if its steps did
_HASTE: Final = 2.0
# seconds for which ordinary requests are taken to need the share of time that they needed lately
_AHEAD: Final = 60.0
# of the time that the pace of others leaves: the rest is for their prompts
_MUST_RUN_SHARE: Final = 0.25

# (deadline, number of arrival, request)
_Entry = tuple[float, int, Request]


class Verdict(NamedTuple):
    """What the last look found; good until the next one."""

    # requests would miss their deadlines if order alone decided between them and demoted ones
    pressing: bool
    # requests that run and must not sit steps out once they stream, the earliest due first
    hurried: tuple[Request, ...]


class Change(NamedTuple):
    """Requests that change tiers."""

    leave: list[Request]
    come_back: list[Request]


class _Work(NamedTuple):
    """What requests need, in the order of their deadlines."""

    # steps until each ends, one token a step
    steps_left: list[int]
    # seconds of the machine's time
    seconds: list[float]
    # when each must have been given these
    latest: list[float]


_CALM: Final = Verdict(False, ())
_NO_CHANGE: Final = Change([], [])


class Deadlines:
    """Asked by ``Feasibility``."""

    def __init__(self, state: SchedulerState, budget: StepBudget) -> None:
        self._waiting = state.waiting
        self._step_time = state.step_time
        self._work = state.work
        self._kv = state.kv
        self._budget = budget
        self._steps = state.steps
        self.verdict = _CALM
        self._steps_until_look = 0
        # requests left out that may come back
        self._left_out: dict[str, Request] = {}

    def rest(self) -> None:
        """The last request has ended."""
        self.verdict = _CALM
        self._steps_until_look = 0
        self._left_out.clear()

    def is_hopeless(self, request: Request, now: float) -> bool:
        """Whether a best-effort request would miss its deadline if nothing else were computed."""
        deadline = request.targets.deadline
        if deadline is None or request.tier is Tier.RELEGATED or not self._step_time.ready:
            return False
        (left,) = self._work.least_left((request,), _QUANTILE)
        latest = request.asked.arrival_time + deadline - left * self._step_seconds(1)
        if request.num_uncomputed_tokens <= 1:
            return now > latest
        if now + self._work.prompt_seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # what is cached of its prompt takes no time: looked for only if that matters
        return now + self._work.prompt_seconds(self._kv.num_to_compute(request)) > latest

    def look(self, view: RunningView, now: float) -> Change:
        """Renew ``verdict``, and return which requests leave and which come back, if a step that
        begins at ``now`` is next. Predictions move slowly: not at every step."""
        self._steps_until_look -= 1
        if self._steps_until_look > 0:
            return _NO_CHANGE
        running = [
            (request.asked.arrival_time + request.targets.deadline, request.order[1], request)
            for request in view.best_effort
            if request.targets.deadline is not None and request.tier is Tier.PROMISED
        ]
        left_before = self._that_may_come_back(now)
        if not running and not self._waiting.promised and not left_before:
            self.verdict = _CALM
            return _NO_CHANGE
        if not self._step_time.ready:
            return _NO_CHANGE
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        jobs = self._waiting.promised[:_MAX_LOOKED_AT]
        if running:
            # the others are in order: sorting is quick
            jobs = sorted(jobs + running)[:_MAX_LOOKED_AT]
        if left_before:
            jobs = sorted(jobs + left_before)
        beside = self._step_time.predict(view.base) if view.ordinary else 0.0
        full = beside + self._budget.full_step_seconds
        work = self._work_of(jobs, view, now, full)
        requests = [request for _, _, request in jobs]
        late = triage(requests, now, work.seconds, work.latest, self._waiting.group)
        self.verdict = _verdict(jobs, work, late, now, full)
        return self._change(late, left_before)

    def _work_of(self, jobs: list[_Entry], view: RunningView, now: float, full: float) -> _Work:
        """What these need; ``full``: seconds of a step filled up with prompts."""
        per_token = self._budget.seconds_per_token(NO_VIEW)
        per_row = self._step_time.row_seconds(0)
        # a step of rows alone, and how long steps filled up with prompts last
        short = self._step_seconds(max(1, view.num_running))
        filling = self._waiting.num_new_tokens * per_token
        # share of the time to come that ordinary requests are taken to need
        taken = min(1.0, self._steps.ordinary_share)
        seconds: list[float] = []
        latest: list[float] = []
        lefts = self._work.least_left([request for _, _, request in jobs], _QUANTILE)
        # a loop of hundreds in a step that does all the rest too: no more calls than it needs
        for (due, _, request), left in zip(jobs, lefts, strict=True):
            own = left * per_row
            # tokens come one a step, and what is between them is not the request's own time
            between = min(left * full, left * short + filling) - own
            start = due - between if between > 0.0 else due
            own += request.num_lacking_tokens * per_token
            if request.request_id in self._left_out:
                # to and fro would cost others their time
                own *= _HASTE
            seconds.append(own)
            ahead = start - now
            latest.append(start - taken * min(ahead, _AHEAD) if ahead > 0.0 else start)
        return _Work(lefts, seconds, latest)

    def _change(self, late: list[Request], left_before: list[_Entry]) -> Change:
        """Which requests leave and which come back, if ``late`` cannot all be in time."""
        gone = {request.request_id for request in late}
        leave = [request for request in late if request.request_id not in self._left_out]
        if len(leave) > _MAX_LEFT_OUT:
            del leave[_MAX_LEFT_OUT:]
            self._steps_until_look = _STEPS_TO_THE_REST
        back = [
            self._left_out.pop(r.request_id) for _, _, r in left_before if r.request_id not in gone
        ]
        for request in leave[: _MAX_LOOKED_AT - len(self._left_out)]:
            if request.status is RequestStatus.WAITING:
                self._left_out[request.request_id] = request
        return Change(leave, back)

    def must_run(self, view: RunningView) -> list[Request]:
        """Requests that run, stream, and would be late if they sat steps out, the earliest first
        and as far as the pace of others, their prompts and the length of steps allow."""
        those = [
            request
            for request in self.verdict.hurried
            if request.status is RequestStatus.RUNNING
            and request.tier is not Tier.ORDINARY
            and request.num_uncomputed_tokens <= 1
        ]
        if not those:
            return those
        rows, before = view.narrow_rows, view.narrow_keys
        own = self._step_time.predict(StepShape(0, 0.0, rows, before)) if rows else 0.0
        # as any best effort: so much longer than the rows of others alone, or so long without them
        most = own + self._budget.best_effort_seconds
        tightest = self._tightest(view)
        if tightest < math.inf:
            most = min(most, own + _MUST_RUN_SHARE * (PACE_SHARE * tightest - own))
        if most == math.inf:
            return those
        keys = list(accumulate(request.num_computed_tokens for request in those))

        def seconds(num: int) -> float:
            return self._step_time.predict(StepShape(0, 0.0, rows + num, before + keys[num - 1]))

        return those[: bisect_right(range(1, len(those) + 1), most, key=seconds)]

    def _tightest(self, view: RunningView) -> float:
        """The tightest TPOT target among paced requests that can be met at all."""
        least = least_target(self._step_time)
        if view.tightest >= least:
            return view.tightest
        targets = (request.targets.tpot or 0.0 for request in view.paced)
        return min((target for target in targets if target >= least), default=math.inf)

    def _that_may_come_back(self, now: float) -> list[_Entry]:
        """Requests left out that still wait in that tier; the others are forgotten."""
        found: list[_Entry] = []
        for name, request in list(self._left_out.items()):
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
                due = request.asked.arrival_time + deadline
                found.append((due, request.order[1], request))
        return found

    def _step_seconds(self, num_rows: int) -> float:
        return self._step_time.predict(StepShape(0, 0.0, num_rows, 0))


def _verdict(
    jobs: list[_Entry], work: _Work, late: list[Request], now: float, full: float
) -> Verdict:
    """What is true of the requests that are not left out."""
    gone = {request.request_id for request in late}
    stays = [request.request_id not in gone for _, _, request in jobs]
    pressing = not all_in_time(
        now,
        [_HASTE * own for own in compress(work.seconds, stays)],
        list(compress(work.latest, stays)),
    )
    hurried = tuple(
        request
        for (due, _, request), left in compress(zip(jobs, work.steps_left, strict=True), stays)
        if request.status is RequestStatus.RUNNING
        and now + _HASTE * (left + _STEPS_BETWEEN_LOOKS) * full > due
    )
    return Verdict(pressing, hurried)
