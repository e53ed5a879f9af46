"""Requests that cannot have their first token in time, and are demoted for others.

Two ways to find them: a request whose prompt alone takes longer than the time left is late in any
case; and of the waiting ones, ``triage`` leaves out the fewest so that the others are on time. Best
effort that cannot meet its deadline is found by ``deadlines``.

A late request is demoted only for requests whose targets it endangers, as long as there are any.
If it still waits once there are none, it rejoins the ordinary requests at its old position. So a
caller with targets never gets less than callers without. Boosted requests are not demoted, or a
light tenant's late request would wait for all of another tenant's flood.

This module does not know what else fills a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from paceline.core.pacing.budget import StepBudget
from paceline.core.pacing.deadlines import Deadlines
from paceline.core.pacing.view import RunningView
from paceline.core.pacing.waiting_targets import MAX_TRIAGED, WaitingTargets
from paceline.core.request import Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Move, Tier

__all__ = ["Feasibility", "Others"]

_STEPS_BETWEEN_TRIAGES: Final = 8
# seconds by which best effort that misses its deadline is treated as having arrived later
_MISSED: Final = 60.0
# most waiting requests that are checked for whether they can be on time, as the step waits for it
_MAX_ASKED: Final = 32


class Others(NamedTuple):
    """Running ordinary requests that have prompts to compute."""

    num: int
    # one of them can still meet its target, or best effort with a deadline runs
    urgent: bool
    # one of them has no target for its first token
    without_ttft_target: bool


class Feasibility:
    """Finds late requests and demotes them, unless ``config.demote_late`` is off."""

    def __init__(self, state: SchedulerState, budget: StepBudget, targets: WaitingTargets) -> None:
        self._state, self._budget, self._targets = state, budget, targets
        self._enabled = state.config.demote_late
        self.deadlines = Deadlines(state, budget, targets, self.demote)
        # number of changes of the queue at the last triage, and steps since then
        self._triaged_at, self._since_triage = -1, 0

    def is_late(self, request: Request, now: float) -> bool:
        """Return whether it would miss its TTFT target even if nothing else were computed."""
        if (
            request.tier is not Tier.ORDINARY
            or request.targets.ttft is None
            or request.boosted
            or request.first_token_time is not None
            or request.num_pending_tokens
            or not self._enabled
            or not self._state.step_time.ready
        ):
            return False
        seconds, kv = self._state.work.prompt_seconds, self._state.kv
        latest = request.asked.arrival_time + request.late_after
        if now + seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # cached tokens of its prompt take no time; they are looked up only if that matters
        runs = request.status is RequestStatus.RUNNING
        return runs or now + seconds(kv.num_lacking(request)) > latest

    def endangers(
        self, late: Request, now: float, others: Others, passed: Sequence[Request] = ()
    ) -> bool:
        """Return whether a late request must be demoted: for one that can meet its target and waits
        or has a prompt to compute, or for best effort with a deadline. Requests without targets
        would gain nothing that they asked for, and streams keep their pace whatever else runs. If
        all others have targets, it is demoted for late ones among them and for requests to come as
        well. ``passed`` waited, and were taken from the queue in this step."""
        if self.deadlines.pressing:
            return True
        waiting = self._state.waiting
        num_waiting = len(waiting.ordinary) - (late in waiting.ordinary)
        runs = late.status is RequestStatus.RUNNING and late.tier is Tier.ORDINARY
        if not passed and not num_waiting and others.num <= runs:
            return False
        untargeted = len(waiting.ordinary) > len(self._targets.dues) or others.without_ttft_target
        if not untargeted and not any(map(_without_ttft_target, passed)):
            return True
        if others.urgent or self._targets.deadline_batch:
            return True
        # the last in order are the likeliest to be on time
        those = chain(passed, *map(reversed, self._targets.targeted.values()))
        return any(
            other is not late and other.targets.ttft is not None and not self.is_late(other, now)
            for other in islice(those, _MAX_ASKED)
        )

    def others(self, view: RunningView, now: float) -> Others:
        """Sum up the ordinary prompts of a step that begins at ``now``."""
        deadline_batch = Tier.DEADLINE_BATCH
        ordinary = [request for request in view.wide if request.tier is Tier.ORDINARY]
        urgent = any(request.tier is deadline_batch for request in view.best_effort) or (
            view.urgent
            and any(r.targets.ttft is not None and not self.is_late(r, now) for r in ordinary)
        )
        return Others(len(ordinary), urgent, any(map(_without_ttft_target, ordinary)))

    def demote(self, request: Request) -> None:
        """Move the request, which must be in no sorted queue, to the tier of late requests."""
        if request.asked.slo.best_effort:
            # sort it behind work that can still be in time, but not for ever
            later = _MISSED * self._state.policy.key_per_second
            request.order = (request.order[0] + later, request.order[1])
        request.move(Move.DEMOTE)
        self._state.last.demoted.append(request)
        self._state.totals.num_demoted += 1

    def settle(self, view: RunningView, now: float) -> bool:
        """Demote running requests that are late and endanger others; return whether any are."""
        late = [request for request in view.wide if self.is_late(request, now)]
        if late:
            others = self.others(view, now)
            late = [request for request in late if self.endangers(request, now, others)]
        for request in late:
            self._state.running.move(request, self.demote)
        return bool(late)

    def triage(self, view: RunningView, starts: float) -> None:
        """Demote the fewest waiting requests so that the others are on time if the next step begins
        at ``starts``. After changes of the queue and every few steps: predictions move slowly."""
        waiting, targets = self._state.waiting, self._targets
        if not targets.targeted or not self._enabled or not self._state.step_time.ready:
            return
        self._since_triage += 1
        if self._triaged_at == targets.num_changes and self._since_triage < _STEPS_BETWEEN_TRIAGES:
            return
        self._since_triage = 0
        per_token = self._budget.seconds_per_token(view)
        unfinished = sum(
            request.num_uncomputed_tokens for request in view.wide if request.tier is Tier.ORDINARY
        )
        if not targets.in_time(starts, unfinished, per_token):
            first = list(islice(self._state.policy.service_order(targets.targeted), MAX_TRIAGED))
            losers = targets.left_out(first, starts + unfinished * per_token, per_token)
            for loser in self._to_demote(losers, first, view, starts):
                waiting.move(loser, self.demote)
        self._triaged_at = targets.num_changes

    def _to_demote(
        self, late: list[Request], first: list[Request], view: RunningView, now: float
    ) -> list[Request]:
        """Return the late requests that a triage of ``first`` found and others gain by."""
        if late and len(late) == len(first) and not self.deadlines.pressing:
            others = self.others(view, now)
            if not self.endangers(first[0], now, others):
                return []
            if len(late) == len(self._state.waiting.ordinary) and not others.num:
                # no request can be on time, so the first need not be demoted
                late = [request for request in late if request is not first[0]]
        return [request for request in late if not request.boosted]


def _without_ttft_target(request: Request) -> bool:
    """Return whether the request never had a target for its first token."""
    return request.slo.ttft is None
