"""Requests that cannot have their first token in time: found, and made to give way.

They become best effort: still served, when nobody else needs the step. A favoured request never
does, or a light tenant's late one would wait for all of a flood; nor one that delays nobody but
best effort with time to spare, beside which it would be computed in small pieces for nothing: it
keeps its place, and best effort, but nobody else, may be displaced for it. Two ways to find them:
one whose prompt alone takes longer than is left is late whatever happens; and of those that wait,
the fewest whose leaving out lets the others be on time (``triage``). Best-effort requests with a
deadline that they cannot meet fall back one band more (``deadlines``).

This module does not know what else fills a step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Final

from paceline.core.pacing.budget import TokenBudget
from paceline.core.pacing.deadlines import Deadlines
from paceline.core.pacing.triage import triage
from paceline.core.pacing.view import Survey
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Move

__all__ = ["Lateness"]

_ORDER: Final = attrgetter("order")
# of those waiting, looked at by one triage: the work of so many takes longer than targets last
_MAX_TRIAGED: Final = 256
_STEPS_BETWEEN_TRIAGES: Final = 8


class Lateness:
    """Owned by the planner.

    Args:
        enabled: False: nobody is ever late.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        policy: SchedulingPolicy,
        waiting: WaitingRoom,
        step_time: StepTimeModel,
        work: WorkEstimator,
        budget: TokenBudget,
    ) -> None:
        self._enabled = enabled
        self._policy = policy
        self._waiting = waiting
        self._step_time = step_time
        self._work = work
        self._budget = budget
        # whose requests may be left out for one another
        self._group = waiting.group
        self._deadlines = Deadlines(
            waiting=waiting,
            step_time=step_time,
            work=work,
            budget=budget,
            group=self._group,
        )
        self.num_relegated = 0
        # of the ordinary requests that run, those that have tokens to compute before they go on
        self._num_wide = 0
        # changes among those waiting that the last triage knew of, and steps since then
        self._triaged_at = -1
        self._since_triage = 0

    def is_late(self, request: Request, now: float) -> bool:
        """Whether not even computing nothing else would meet its TTFT target any more; of a
        best-effort request, its deadline."""
        targets = request.targets
        if request.favoured:
            return False
        if request.best_effort:
            return self._enabled and self._deadlines.is_hopeless(request, now)
        if (
            targets.ttft is None
            or not self._enabled
            or request.first_token_time is not None
            or request.num_pending_tokens
            or not self._step_time.ready
        ):
            return False
        latest = request.asked.arrival_time + targets.ttft
        if now + self._work.prompt_seconds(request.num_uncomputed_tokens) <= latest:
            return False
        # what is cached of its prompt takes no time: looked for only if that matters
        return now + self._work.prompt_seconds(self._waiting.num_lacking(request)) > latest

    def delays_others(self, request: Request) -> bool:
        """Whether somebody gains if this one, which runs, waits or was taken from the queue, makes
        way: of ordinary requests another one that waits or has a prompt to compute, or best effort
        whose deadlines press. Those that stream are kept at their pace whatever else runs."""
        if request.best_effort or self._waiting.pressing:
            return True
        wide = self._num_wide - (request.status is RequestStatus.RUNNING)
        ordinary = self._waiting.ordinary
        return wide > 0 or len(ordinary) > (request in ordinary)

    def relegate(self, request: Request) -> None:
        """Make it best effort, or less if it is that, with an order to match; the caller has it in
        no ordered place."""
        request.order = (self._policy.later(request.order[0]), request.order[1])
        request.move(Move.DEMOTE)
        self.num_relegated += 1

    def relegate_running(self, running: list[Request], wide: Iterable[Request], now: float) -> bool:
        """Those of ``wide``, which run, whose first token is late whatever happens make way for the
        others. Returns whether there were any; ``running`` stays in order."""
        found = False
        wide = list(wide)
        self._num_wide = sum(not request.best_effort for request in wide)
        for request in wide:
            if self.is_late(request, now) and self.delays_others(request):
                found = True
                self._num_wide -= not request.best_effort
                running.remove(request)
                self.relegate(request)
                insort(running, request, key=_ORDER)
        return found

    def rest(self) -> None:
        """Nobody is left, and it may be long until a step is planned again."""
        self._deadlines.rest()

    def hurry(self, survey: Survey) -> None:
        """Tell best-effort requests apart that are not to sit this step out."""
        if self._enabled:
            survey.hurry(self._deadlines.hurried(survey))

    def keep_deadlines(self, running: list[Request], survey: Survey, starts: float) -> bool:
        """Let those best-effort requests go that cannot all be done in time, and take those back
        that can after all. Returns whether any of ``running`` were let go; it stays in order."""
        found = False
        if not self._enabled:
            return found
        verdict = self._deadlines.look(survey, starts)
        for loser in verdict.leave:
            if loser.favoured:
                continue
            if loser in self._waiting:
                self._waiting.remove(loser)
                self.relegate(loser)
                self._waiting.push(loser)
            else:
                found = True
                running.remove(loser)
                self.relegate(loser)
                insort(running, loser, key=_ORDER)
        for key, request in verdict.come_back:
            self._waiting.remove(request)
            request.move(Move.RESTORE)
            request.order = key, request.order[1]
            self._waiting.push(request)
        return found

    def others_take(self, starts: float, seconds: float) -> None:
        """A step that begins at ``starts`` is predicted to last so long without best effort."""
        self._deadlines.others_take(starts, seconds)

    def triage(self, survey: Survey, starts: float) -> None:
        """Let those go who cannot all be on time, if a step that begins at ``starts`` is next."""
        waiting = self._waiting.targeted
        if not waiting or not self._enabled or not self._step_time.ready:
            return
        # predictions move slowly: look again when somebody came or went, or every so often
        self._since_triage += 1
        if (
            self._triaged_at == self._waiting.num_changes
            and self._since_triage < _STEPS_BETWEEN_TRIAGES
        ):
            return
        self._since_triage = 0
        per_token = self._budget.seconds_per_token(survey)
        unfinished = sum(
            request.num_uncomputed_tokens for request in survey.wide if not request.best_effort
        )
        self._triaged_at = self._waiting.num_changes
        to_compute = unfinished + self._waiting.num_ordinary_tokens
        if starts + to_compute * per_token <= self._waiting.earliest_due:
            # nobody will be late, in whatever order
            return
        first = list(islice(self._policy.service_order(waiting), _MAX_TRIAGED))
        losers = triage(
            first,
            starts + unfinished * per_token,
            # a fork has its prompt already
            [request.num_lacking_tokens * per_token for request in first],
            [request.asked.arrival_time + (request.targets.ttft or 0.0) for request in first],
            self._group,
        )
        if (
            len(losers) == len(self._waiting.ordinary)
            and not unfinished
            and not self._waiting.pressing
        ):
            # nobody can be on time, so the first makes way for nobody
            losers.remove(first[0])
        for loser in losers:
            if not loser.favoured:
                self._waiting.remove(loser)
                self.relegate(loser)
                self._waiting.push(loser)
        self._triaged_at = self._waiting.num_changes
