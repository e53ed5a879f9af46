"""Best-effort requests with a deadline: which of them can still meet it, and which must hurry.

They come after ordinary requests, and before requests that have missed their targets only if they
would be late otherwise: a chat that is a little late does not wait behind a whole night's batch
work. If not all of them can meet their deadlines, the fewest are left out (``triage``).

Ordinary requests are assumed to need as much time as they did lately for ``_AHEAD`` seconds, and
none after that: a night's batch work is not given up for an evening's load. Requests that were left
out and still wait are judged again, and restored when there is time to spare.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from operator import methodcaller
from typing import Final

from paceline.core.pacing.budget import PACE_SHARE, StepBudget, least_target
from paceline.core.pacing.view import NO_VIEW, RunningView
from paceline.core.pacing.waiting_targets import (
    DueEntry,
    WaitingTargets,
    all_in_time,
    due_entry,
    is_deadline_batch,
    triage,
)
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Move, Tier

__all__ = ["Deadlines"]

# most requests in one look, those due first; requests due later are looked at later
_MAX_LOOKED_AT: Final = 128
_STEPS_BETWEEN_LOOKS: Final = 8
# most requests left out by one look, as the step waits for it; the next look then comes sooner
_MAX_LEFT_OUT: Final = 32
_STEPS_TO_THE_REST: Final = 2
# quantile of predicted lengths: a request that is left out would more likely be late than not
_QUANTILE: Final = 0.5
# safety factor on predicted times: deadlines press if a request would be late with it on all work,
# and a streaming request must run if it would be late with it on its steps
_HASTE: Final = 2.0
# seconds for which ordinary requests are assumed to need the share of time that they needed lately
_AHEAD: Final = 60.0
# share of the time that the pace of others leaves, for rows that must run; the rest is for prompts
_MUST_RUN_SHARE: Final = 0.25

# restores a request that was left out
_RESTORE: Final = methodcaller("move", Move.RESTORE)


class Deadlines:
    """Judges requests with deadlines; called by ``Paced`` at every step."""

    def __init__(
        self,
        state: SchedulerState,
        budget: StepBudget,
        targets: WaitingTargets,
        demote: Callable[[Request], None],
    ) -> None:
        self._state, self._budget, self._targets, self._demote = state, budget, targets, demote
        # requests left out that may be restored
        self._left_out: dict[Request, DueEntry] = {}
        self.rest()

    def rest(self) -> None:
        """Forget what the last look found: the last request has ended."""
        self._steps_until_look = 0
        self._left_out.clear()
        # True: deadlines would be missed if order alone decided between these and demoted requests
        self.pressing = False
        # running requests that must not skip a step once they stream, the earliest due first
        self._hurried: Sequence[Request] = ()

    def look(self, view: RunningView, now: float) -> bool:
        """Every few steps, demote the requests that cannot be in time if the next step begins at
        ``now``, and restore others. Returns whether a running request changed its tier."""
        self._steps_until_look -= 1
        if self._steps_until_look > 0:
            return False
        running = list(map(due_entry, filter(is_deadline_batch, view.best_effort)))
        left_before = self._that_may_come_back(now)
        if not running and not self._targets.deadline_batch and not left_before:
            self.pressing, self._hurried = False, ()
            return False
        if not self._state.step_time.ready:
            return False
        self._steps_until_look = _STEPS_BETWEEN_LOOKS
        # most of them are in order already, so sorting is quick
        first = sorted(self._targets.deadline_batch[:_MAX_LOOKED_AT] + running)[:_MAX_LOOKED_AT]
        jobs = sorted(first + left_before)
        late = self._judge(jobs, view, now)
        return self._change(late, [request for _, _, request in left_before if request not in late])

    def _judge(self, jobs: list[DueEntry], view: RunningView, now: float) -> Mapping[Request, None]:
        """Return the requests to leave out, and note whether the others press or must run."""
        requests = [request for _, _, request in jobs]
        beside = self._state.step_time.predict(view.base) if view.ordinary else 0.0
        full = beside + self._budget.full_step_seconds
        lefts = self._state.work.least_left(requests, _QUANTILE)
        seconds, latest = self._work_of(jobs, lefts, view.num_running, now, full)
        late = dict.fromkeys(triage(requests, now, seconds, latest, self._targets.group))
        running, stays = RequestStatus.RUNNING, [request not in late for request in requests]
        kept = (_HASTE * own for own in compress(seconds, stays))
        self.pressing = not all_in_time(now, kept, compress(latest, stays))
        self._hurried = [
            request
            for (due, _, request), left in compress(zip(jobs, lefts, strict=True), stays)
            if request.status is running
            and now + _HASTE * (left + _STEPS_BETWEEN_LOOKS) * full > due
        ]
        return late

    def _work_of(
        self, jobs: list[DueEntry], lefts: list[int], num_running: int, now: float, full: float
    ) -> tuple[list[float], list[float]]:
        """Return the engine's seconds that each job needs, and when it must have got them. Jobs end
        in ``lefts`` steps, and a step filled up with prompts takes ``full`` seconds."""
        per_token = self._budget.seconds_per_token(NO_VIEW)
        per_row = self._state.step_time.row_seconds(0)
        # seconds of a step of rows alone, and of all waiting prompts
        short = self._state.step_time.predict(StepShape(0, 0.0, max(1, num_running), 0))
        filling = sum(self._state.waiting.num_tokens) * per_token
        # share of the time to come that ordinary requests are assumed to need
        taken = min(1.0, self._state.steps.ordinary_share)
        left_out = self._left_out
        seconds: list[float] = []
        latest: list[float] = []
        # this loop runs hundreds of times while a step waits, so it avoids calls
        for (due, _, request), left in zip(jobs, lefts, strict=True):
            own = left * per_row
            # tokens come one per step, and the time between them goes to other requests
            between, beside = left * full - own, left * short + filling - own
            if beside < between:
                between = beside
            start = due - between if between > 0.0 else due
            own += request.num_lacking_tokens * per_token
            if request in left_out:
                # restoring and demoting it by turns would cost others time
                own *= _HASTE
            seconds.append(own)
            ahead = start - now
            if ahead > 0.0:
                start -= taken * (ahead if ahead < _AHEAD else _AHEAD)
            latest.append(start)
        return seconds, latest

    def _change(self, late: Iterable[Request], back: list[Request]) -> bool:
        """Demote ``late`` requests and restore ``back``; return whether one that ran is demoted."""
        leave = [request for request in late if request not in self._left_out]
        if len(leave) > _MAX_LEFT_OUT:
            del leave[_MAX_LEFT_OUT:]
            self._steps_until_look = _STEPS_TO_THE_REST
        for request in back:
            del self._left_out[request]
        room = _MAX_LOOKED_AT - len(self._left_out)
        found = False
        for number, request in enumerate(leave):
            runs = request.status is RequestStatus.RUNNING
            if number < room and not runs:
                self._left_out[request] = due_entry(request)
            if not request.boosted:
                (self._state.running if runs else self._state.waiting).move(request, self._demote)
                found = found or runs
        for request in back:
            self._state.waiting.move(request, _RESTORE)
        return found

    def must_run(self, view: RunningView) -> tuple[Request, ...]:
        """Return running requests that stream and would be late if they skipped steps, the earliest
        first, as far as the pace of others, their prompts and the length of steps allow."""
        those = tuple(
            r
            for r in self._hurried
            if r.status is RequestStatus.RUNNING and r.best_effort and r.num_uncomputed_tokens <= 1
        )
        if not those:
            return those
        rows, before = view.narrow_rows, view.narrow_keys
        own = self._state.step_time.predict(StepShape(0, 0.0, rows, before)) if rows else 0.0
        # like other best effort, they may add at most this to a step of the others' rows
        most = own + self._budget.best_effort_seconds
        least = least_target(self._state.step_time)
        tightest = min((pace for pace in view.paces if pace >= least), default=math.inf)
        most = min(most, own + _MUST_RUN_SHARE * (PACE_SHARE * tightest - own))
        if most == math.inf:
            return those
        keys = accumulate(request.num_computed_tokens for request in those)
        shapes = [StepShape(0, 0.0, rows + num, before + own) for num, own in enumerate(keys, 1)]
        return those[: bisect_right(shapes, most, key=self._state.step_time.predict)]

    def _that_may_come_back(self, now: float) -> list[DueEntry]:
        """Return the requests left out that still wait in that tier, and forget the others."""
        self._left_out = {
            request: entry
            for request, entry in self._left_out.items()
            if request.status is RequestStatus.WAITING
            and request.tier is Tier.DEMOTED
            and now <= entry[0]
            and not request.num_pending_tokens
        }
        return list(self._left_out.values())
