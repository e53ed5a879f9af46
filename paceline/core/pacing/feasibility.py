"""Which requests cannot have their first token in time, and yield for that.

They are demoted: still served, when no other request needs the step. Two ways to find them: a
request whose prompt alone takes longer than is left is late in any case; and of those that wait,
the fewest whose leaving out lets the others be on time (``triage``). Best-effort requests with a
deadline that they cannot meet are demoted as well (``deadlines``).

Not demoted are favoured requests, or a light tenant's late one would wait for all of a flood; and
requests that delay only best effort with time to spare, beside which they would be computed in
small pieces for nothing: such a request keeps its place and displaces only best-effort work.

This module does not know what else fills a step.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

from paceline.core.pacing.budget import StepBudget
from paceline.core.pacing.deadlines import Deadlines
from paceline.core.pacing.triage import triage
from paceline.core.pacing.view import RunningView
from paceline.core.request import Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Move, Tier

__all__ = ["Feasibility"]

# of those waiting, looked at by one triage: the work of so many takes longer than targets last
_MAX_TRIAGED: Final = 256
_STEPS_BETWEEN_TRIAGES: Final = 8


class Feasibility:
    """Finds late requests and demotes them.

    Args:
        deadlines: of best-effort requests.
    """

    def __init__(self, state: SchedulerState, budget: StepBudget, deadlines: Deadlines) -> None:
        self._enabled = state.config.relegate_late
        self._later = state.policy.later
        self._service_order = state.policy.service_order
        self._waiting = state.waiting
        self._running = state.running
        self._step_time = state.step_time
        self._work = state.work
        self._kv = state.kv
        self._budget = budget
        self._deadlines = deadlines
        self.num_demoted = 0
        # of the ordinary requests that run, those that have tokens to compute before they go on
        self._num_wide = 0
        # changes among those waiting that the last triage knew of, and steps since then
        self._triaged_at = -1
        self._since_triage = 0

    @property
    def pressing(self) -> bool:
        """Whether best-effort requests would miss their deadlines if order alone decided between
        them and those that have missed theirs."""
        return self._deadlines.verdict.pressing

    def rest(self) -> None:
        """The last request has ended."""
        self._deadlines.rest()
        self._num_wide = 0

    # ------------------------------------------------------------------ one request

    def is_late(self, request: Request, now: float) -> bool:
        """Whether not even computing nothing else would meet its TTFT target any more; of a
        best-effort request, its deadline."""
        if request.favoured or not self._enabled:
            return False
        if request.tier is not Tier.ORDINARY:
            return self._deadlines.is_hopeless(request, now)
        ttft = request.targets.ttft
        if (
            ttft is None
            or request.first_token_time is not None
            or request.num_pending_tokens
            or not self._step_time.ready
        ):
            return False
        latest = request.asked.arrival_time + ttft
        if now + self._work.prompt_seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # what is cached of its prompt takes no time: looked for only if that matters
        return now + self._work.prompt_seconds(self._kv.num_to_compute(request)) > latest

    def delays_others(self, request: Request) -> bool:
        """Whether another request gains if this one, which runs, waits or was taken from the queue,
        makes way: an ordinary one that waits or has a prompt to compute, or best effort whose
        deadlines press. Those that stream are kept at their pace whatever else runs."""
        if request.tier is not Tier.ORDINARY or self.pressing:
            return True
        wide = self._num_wide - (request.status is RequestStatus.RUNNING)
        ordinary = self._waiting.ordinary
        return wide > 0 or len(ordinary) > (request in ordinary)

    def demote(self, request: Request) -> None:
        """Move the request, which is in no ordered place, to the tier of those that are late, with
        an order to match."""
        request.order = (self._later(request.order[0]), request.order[1])
        request.move(Move.DEMOTE)
        self.num_demoted += 1

    # ------------------------------------------------------------------ all of them

    def settle(self, starts: float) -> RunningView:
        """Move late requests to their tiers, if a step that begins at ``starts`` is next, and
        return the running requests as they then are."""
        running = self._running.requests
        view = RunningView.of(running)
        moved = self._demote_running(view, starts)
        if self._enabled:
            moved = self._keep_deadlines(view, starts) or moved
        if moved:
            view = RunningView.of(running)
        return self.hurry(view)

    def hurry(self, view: RunningView) -> RunningView:
        """Tell best-effort requests apart that must not sit this step out."""
        return view.hurry(self._deadlines.must_run(view)) if self._enabled else view

    def _demote_running(self, view: RunningView, now: float) -> bool:
        """Running requests whose first token is late in any case yield to the others. Returns
        whether there were any."""
        found = False
        self._num_wide = sum(request.tier is Tier.ORDINARY for request in view.wide)
        for request in view.wide:
            if self.is_late(request, now) and self.delays_others(request):
                found = True
                self._num_wide -= request.tier is Tier.ORDINARY
                self._running.move(request, self.demote)
        return found

    def _keep_deadlines(self, view: RunningView, starts: float) -> bool:
        """Demote best-effort requests that cannot all be done in time, and restore those that can
        after all. Returns whether any that run were demoted."""
        found = False
        change = self._deadlines.look(view, starts)
        for loser in change.leave:
            if loser.favoured:
                continue
            if loser in self._waiting:
                self._waiting.move(loser, self.demote)
            else:
                found = True
                self._running.move(loser, self.demote)
        for key, request in change.come_back:
            self._waiting.move(request, partial(_restore, key))
        return found

    def triage(self, view: RunningView, starts: float) -> None:
        """Demote waiting requests that cannot all be on time, if a step that begins at ``starts``
        is next."""
        waiting = self._waiting.targeted
        if not waiting or not self._enabled or not self._is_triage_due():
            return
        per_token = self._budget.seconds_per_token(view)
        unfinished = sum(
            request.num_uncomputed_tokens for request in view.wide if request.tier is Tier.ORDINARY
        )
        self._triaged_at = self._waiting.num_changes
        to_compute = unfinished + self._waiting.num_ordinary_tokens
        if starts + to_compute * per_token <= self._waiting.earliest_due:
            # no request will be late, in whatever order
            return
        first = list(islice(self._service_order(waiting), _MAX_TRIAGED))
        losers = triage(
            first,
            starts + unfinished * per_token,
            # a fork has its prompt already
            [request.num_lacking_tokens * per_token for request in first],
            [request.asked.arrival_time + (request.targets.ttft or 0.0) for request in first],
            self._waiting.group,
        )
        if len(losers) == len(self._waiting.ordinary) and not unfinished and not self.pressing:
            # none can be on time, so the first yields to none
            losers.remove(first[0])
        for loser in losers:
            if not loser.favoured:
                self._waiting.move(loser, self.demote)
        self._triaged_at = self._waiting.num_changes

    def _is_triage_due(self) -> bool:
        """Predictions move slowly: when a request came or went, or every so often."""
        if not self._step_time.ready:
            return False
        self._since_triage += 1
        if (
            self._triaged_at == self._waiting.num_changes
            and self._since_triage < _STEPS_BETWEEN_TRIAGES
        ):
            return False
        self._since_triage = 0
        return True


def _restore(key: float, request: Request) -> None:
    """Back to the tier and the key that it had."""
    request.move(Move.RESTORE)
    request.order = key, request.order[1]
