"""Pacing for latency targets: limits of each step so that the targets of requests are met.

At the start of each step, in this order:

1. *Settle the tiers of running requests*: requests that cannot be on time are demoted
   (``feasibility``), best-effort requests with deadlines are demoted or restored (``deadlines``).
2. *Budget*: how many tokens and seconds the step may take (``budget``, the memory-pressure
   valve).
3. *Settle the tiers of waiting requests*: triage.
4. *Displace* running requests that the first waiting request beats.
5. *Passes*: ordinary requests, then best effort tier by tier.

The result is a ``PacedStep``, a new one for each step.

This module does not know how rows are written or requests admitted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.budget import StepBudget, TpotGuard
from paceline.core.pacing.feasibility import Feasibility, Others
from paceline.core.pacing.limits import PacedStep
from paceline.core.pacing.share import GuaranteedShare
from paceline.core.pacing.tenants import TenantShares
from paceline.core.pacing.view import RunningView
from paceline.core.pacing.waiting_targets import WaitingTargets
from paceline.core.request import Request
from paceline.core.step.displacement import displace
from paceline.core.step.limits import Pass
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Paced"]

# tiers that get rows and are admitted together, in order: (first, last)
_BEST_EFFORT: Final = ((Tier.DEADLINE_BATCH, Tier.DEMOTED), (Tier.BACKGROUND, Tier.BACKGROUND))
# the same while deadlines press
_PRESSED: Final = tuple((tier, tier) for tier in Tier if tier is not Tier.ORDINARY)


class Paced:
    """The ``Pacing`` for targets, best effort, and tenants that are kept apart, if not None."""

    def __init__(self, state: SchedulerState, tenants: TenantShares | None) -> None:
        config, model, chunk = state.config, state.step_time, state.chunk
        self._state, self._tenants = state, tenants
        self.budget = StepBudget(model, chunk, state.work, config)
        self.share = GuaranteedShare(state)
        self.waiting_targets = WaitingTargets(state)
        self.feasibility = Feasibility(state, self.budget, self.waiting_targets)
        self._deadlines = self.feasibility.deadlines

    def begin(self, now: float, starts: float, *, held: bool) -> PacedStep:
        state, feasibility = self._state, self.feasibility
        view, waiting_boosted = self._settle(starts)
        self.share.begin(view, starts)
        allowance = self.budget.allow(view, starts, 0 if held else self._lacking(view))
        num_running = view.num_running
        tokens = state.valve.cap(allowance.tokens, num_running)
        # if the step is too short for all boosted prompts, running requests come first
        left = tokens - num_running - (view.boosted - waiting_boosted)
        reserved = max(0, min(waiting_boosted, left))
        background_seconds = self.share.background_seconds(view)
        others, guard = feasibility.others(view, now), self._guard(view)
        displaced_for: Request | None = None
        if not held and len(state.waiting):
            feasibility.triage(view, starts)
            if allowance.wide:
                displaced_for, lacking = self._displace(guard, others, now)
            if displaced_for is not None:
                reserved = max(reserved, lacking)
                view = RunningView.of(state.running.requests)
                view = replace(view, must_run=self._deadlines.must_run(view))
                guard = self._guard(view)
        evicted: Request | None = None
        if state.valve.level >= Pressure.PREEMPT_BEST_EFFORT and view.ordinary and view.best_effort:
            # memory is nearly full and others run: the last request of the latest tier is preempted
            evicted = max(
                view.best_effort,
                key=lambda r: (not r.granted, r not in view.must_run, r.tier, r.order),
            )
        pressing = self._deadlines.pressing
        step = PacedStep(
            budget=tokens, state=state, now=now,
            chunk_tokens=allowance.saved_for or allowance.tokens - num_running,
            passes=_passes(view, evicted, pressing=pressing), reserved=reserved,
            pressing=pressing, evicted=evicted, seconds=allowance.seconds,
            background_seconds=background_seconds, ordinary_seconds=0.0,
            model=state.step_time, feasibility=feasibility, share=self.share, guard=guard,
            kept=min(self.share.tokens(view), max(0, tokens - view.num_running)),
            added_seconds=self.budget.added_seconds(view), others=others,
            displaced_for=displaced_for, wide=allowance.wide,
        )  # fmt: skip
        self.share.planned(step)
        return step

    def rest(self) -> None:
        """Reset deadlines and share: the last request has ended."""
        self._deadlines.rest()
        self.share.rest()

    def _settle(self, starts: float) -> tuple[RunningView, int]:
        """Move running requests to their tiers for a step that begins at ``starts``. Returns the
        view of them, and the prompt tokens that a light tenant's waiting request lacks."""
        state, tenants = self._state, self._tenants
        running = state.running.requests
        step_rows = math.inf if tenants is None else tenants.step_rows
        view = RunningView.of(running, step_rows=step_rows)
        if state.config.demote_late:
            moved = self.feasibility.settle(view, starts)
            if self._deadlines.look(view, starts) or moved:
                view = RunningView.of(running, step_rows=step_rows)
        must_run, boosted, waiting = self._deadlines.must_run(view), 0, 0
        if tenants is not None:
            waiting = self._boosted_tokens(view, state.waiting.ordinary.peek())
            boosted = waiting + sum(r.num_uncomputed_tokens for r in view.wide if r.boosted)
        if must_run or boosted:
            view = replace(view, must_run=must_run, boosted=boosted)
        return view, waiting

    def _lacking(self, view: RunningView) -> int:
        """Return the tokens that the prompts of running requests, and of the first one that waits,
        lack."""
        head = self._state.waiting.ordinary.peek() if view.paced else None
        lacking = sum(r.num_uncomputed_tokens for r in view.wide if r.tier is Tier.ORDINARY)
        return lacking + (0 if head is None else head.num_lacking_tokens)

    def _guard(self, view: RunningView) -> TpotGuard | None:
        state = self._state
        if not state.config.pace_admission:
            return None
        return TpotGuard(view, state.step_time, state.chunk.away_s)

    def _boosted_tokens(self, view: RunningView, head: Request | None) -> int:
        """Return the prompt tokens that the first waiting request lacks once it is admitted; 0 if
        it is not boosted, or if a lack of slots or memory would keep it out."""
        state, num_running = self._state, view.num_running
        if head is None or not head.boosted or head.num_pending_tokens:
            return 0
        is_full = num_running >= state.config.max_num_seqs
        if is_full or state.kv.shortfall(head, beside_others=num_running > 0) > 0:
            return 0
        if state.config.future_memory_check and num_running:
            outlook = state.outlook(Tier.ORDINARY, view.ordinary)
            if not outlook.admits(head, state.kv.num_in_use(head)):
                return 0
        return state.kv.num_lacking(head)

    def _displace(
        self, guard: TpotGuard | None, others: Others, now: float
    ) -> tuple[Request | None, int]:
        """Preempt running requests that keep a better waiting one out, if any do. Returns that one,
        and the tokens which it lacks, to be kept for it in this step."""
        state, feasibility = self._state, self.feasibility
        head = state.waiting.first(pressing=self._deadlines.pressing)
        if head is None or (head.best_effort and state.valve.level >= Pressure.HOLD_BEST_EFFORT):
            # the head would not be admitted, however many requests it displaced
            return None, 0
        late = feasibility.is_late(head, now)
        if (late and feasibility.endangers(head, now, others)) or (
            guard is not None and not guard.allows(head)
        ):
            return None, 0
        displaces = self._displaces_though_late if late else state.policy.displaces
        lacking = displace(state, head, now, displaces)
        return (head, lacking) if lacking else (None, 0)

    def _displaces_though_late(self, waiting: Request, running: Request) -> bool:
        """Return whether a late request displaces a running one: never one with a target."""
        if not running.best_effort and running.targets.has_targets:
            return False
        return self._state.policy.displaces(waiting, running)


def _passes(view: RunningView, evicted: Request | None, *, pressing: bool) -> tuple[Pass, ...]:
    """Return the passes: ordinary requests, boosted ones first, then best effort by tiers."""
    ordinary = view.ordinary
    if view.boosted:
        ordinary = sorted(ordinary, key=lambda request: not request.boosted)
    best_effort = view.best_effort
    if view.must_run or evicted is not None:
        apart = {evicted, *view.must_run}
        best_effort = [request for request in best_effort if request not in apart]
    return (
        Pass(ordinary, [r for r in view.must_run if r is not evicted], Tier.ORDINARY),
        *(
            Pass([r for r in best_effort if first <= r.tier <= last], [], last)
            for first, last in (_PRESSED if pressing else _BEST_EFFORT)
        ),
    )
