"""One step's rows: who runs, who is let in, who has to go.

The stages are told in ``scheduler``; ``fill`` goes through them, and each has a module of its own:
``rows`` for those that run, ``intake`` for those that wait, ``best_effort`` for both once more.
State lives in what the planner is given; it keeps none of its own from one step to the next but
counters.

This module does not know how requests come and end, nor what a step brings.
"""

from __future__ import annotations

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.preemption import Preemption
from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.ageing import Patience
from paceline.core.pacing.budget import TokenBudget
from paceline.core.pacing.feasibility import Lateness
from paceline.core.pacing.view import Survey
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.queues.forks import Forks
from paceline.core.queues.running import Running
from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.step.admission import Intake
from paceline.core.step.best_effort import BestEffort
from paceline.core.step.builder import Draft
from paceline.core.step.rows import Rows
from paceline.core.tier import Tier

__all__ = ["Planner"]


class Planner:
    """Fills drafts. Owned by the scheduler, with whom it shares everything it is given."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        kv: KVCacheManager,
        policy: SchedulingPolicy,
        waiting: WaitingRoom,
        forks: Forks,
        step_time: StepTimeModel,
        work: WorkEstimator,
        budget: TokenBudget,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._kv = kv
        self._mixes = policy.mixes
        self._waiting = waiting
        self._budget = budget
        self._step_time = step_time
        preemption = Preemption(config, cache, kv, work)
        self.running = Running(preemption, waiting)
        self.lateness = Lateness(
            enabled=config.relegate_late,
            policy=policy,
            waiting=waiting,
            step_time=step_time,
            work=work,
            budget=budget,
        )
        self._rows = Rows(
            cache,
            kv=kv,
            policy=policy,
            waiting=waiting,
            running=self.running,
            forks=forks,
            step_time=step_time,
            preemption=preemption,
        )
        self.intake = Intake(
            config,
            cache,
            kv=kv,
            policy=policy,
            waiting=waiting,
            running=self.running,
            rows=self._rows,
            lateness=self.lateness,
            step_time=step_time,
            work=work,
            budget=budget,
        )
        self._patience = Patience(waiting, config.best_effort_delay_s)
        self._best_effort = BestEffort(waiting, self.running, self._rows, self.intake)

    def fill(
        self,
        draft: Draft,
        survey: Survey,
        now: float,
        *,
        starts: float,
        held: bool,
        pressure: Pressure,
    ) -> Reason | None:
        """Plan rows.

        Args:
            survey: of ``running``.
            starts: when the step is predicted to start.
            held: the policy lets nobody in for now.
            pressure: the memory valve's level.

        Returns:
            What holds the head of the queue up; None if nothing does.
        """
        running = self.running.requests
        self.intake.begin(survey)
        self._patience.look(now, survey)
        # a light tenant's prompt is not cut short by prompts that came before it
        reserved = survey.favoured_waiting
        if not held and self._waiting:
            self.lateness.triage(survey, starts)
            # nor that of one for whom somebody made way
            lacking = self.intake.displace(now, pressure)
            if lacking:
                reserved = max(reserved, lacking)
                survey = Survey.of(running)
                self.lateness.hurry(survey)
                self.intake.begin(survey)
        if not self._mixes:
            self._choose_kind(draft, held)
        others = len(survey.best_effort)
        if (
            pressure >= Pressure.PREEMPT_BEST_EFFORT
            and survey.awaited
            and (others or survey.hurried)
        ):
            survey.leave(self._best_effort.make_way(survey, now))
            others = len(survey.best_effort)
        left = len(survey.hurried) + others + reserved
        preempted = self._rows.extend(draft, survey.ordinary, left, now)
        held_by: Reason | None = Reason.POLICY if held or not draft.wide else None
        if held_by is None and preempted and running:
            held_by = Reason.MEMORY
        num_ordinary = len(draft.rows)
        preempted = self._hurry(draft, survey.hurried, now)
        num_hurried = len(draft.rows) - num_ordinary
        if held_by is None and self._waiting:
            draft.budget -= others
            held_by = self.intake.let_in(draft, now, pressure, Tier.ORDINARY)
            draft.budget += others
        if held_by is None and preempted:
            held_by = Reason.MEMORY
        alone = 0.0
        if len(draft.rows) > num_hurried:
            alone = self._step_time.predict(draft.shape) - draft.best_effort_cost
        self.lateness.others_take(starts, alone)
        if others or self._waiting:
            held_by = self._best_effort.fill(draft, survey, now, pressure, held_by)
        if not draft.rows and not draft.narrow:
            self._fill_narrow(draft, now)
        for child in draft.forked:
            self._waiting.enter(child, now)
        if draft.background_cost:
            self._budget.charge(draft.background_cost)
        return held_by

    def _hurry(self, draft: Draft, hurried: list[Request], now: float) -> bool:
        """Rows for best effort that is not to sit this step out. Returns whether anybody had to
        give way for them."""
        # those that have not made way for others
        running = [r for r in hurried if r.status is RequestStatus.RUNNING]
        if not running:
            return False
        for request in running:
            request.num_skipped_steps = 0
        before = self._step_time.predict(draft.shape)
        # they are narrow: no token has to be left for anybody
        preempted = self._rows.extend(draft, running, 0, now)
        draft.best_effort_cost += self._step_time.predict(draft.shape) - before
        return preempted

    def _choose_kind(self, draft: Draft, held: bool) -> None:
        """For a policy that does not mix: wide rows while there are any to compute."""
        running = self.running.requests
        draft.wide = any(r.num_uncomputed_tokens > 1 for r in running)
        if not draft.wide and not held:
            head = self._waiting.first()
            draft.wide = not running or (
                head is not None
                and len(running) < self._max_num_seqs
                and self._kv.shortfall(head, beside_others=True) == 0
            )
        draft.narrow = not draft.wide

    def _fill_narrow(self, draft: Draft, now: float) -> None:
        """No wide row could be had after all (memory): do not waste the step."""
        draft.narrow = True
        running = self.running.requests
        rest = [r for r in running if r.best_effort]
        self._rows.extend(draft, [r for r in running if not r.best_effort], len(rest), now)
        self._rows.extend(draft, [r for r in running if r.best_effort], 0, now, limited=True)
