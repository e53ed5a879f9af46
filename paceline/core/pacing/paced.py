"""Pacing for latency targets: what a step may do so that each caller's target is met.

At the start of each step, in this order:

1. *Settle the tiers of running requests*: requests that cannot be on time yield (``feasibility``),
   best-effort requests with deadlines are demoted or restored (``deadlines``).
2. *Budget*: how many tokens and seconds the step may take (``budget``, ``token_bucket``, the
   memory-pressure valve).
3. *Settle the tiers of waiting requests*: ageing, then triage.
4. *Make way* for the first waiting request, if it beats running ones.
5. *Passes*: ordinary requests, then best effort tier by tier.

All of it becomes one ``PacedLimits``, made anew for each step.

This module does not know how rows are written or requests admitted.
"""

from __future__ import annotations

from typing import Final

from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.ageing import Ageing
from paceline.core.pacing.budget import AdaptiveBudget, FixedBudget, StepBudget
from paceline.core.pacing.deadlines import Deadlines
from paceline.core.pacing.feasibility import Feasibility
from paceline.core.pacing.limits import BestEffortTime, PacedLimits
from paceline.core.pacing.tenants import TenantShares
from paceline.core.pacing.token_bucket import BackgroundBucket
from paceline.core.pacing.tpot_guard import TpotGuard
from paceline.core.pacing.view import RunningView
from paceline.core.request import Request
from paceline.core.step.admission import Admission
from paceline.core.step.displacement import Displacement
from paceline.core.step.limits import Pass, cap_chunk
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Paced"]

# tiers that get rows and are admitted together, in order: (first, last)
_BEST_EFFORT: Final = ((Tier.PROMISED, Tier.RELEGATED), (Tier.BACKGROUND, Tier.BACKGROUND))
# the same while deadlines press
_PRESSED: Final = tuple((tier, tier) for tier in Tier if tier is not Tier.ORDINARY)


class Paced:
    """A ``Pacing`` for requests with targets, or of best effort, or tenants that are kept apart.

    Args:
        tenants: None where they are not kept apart.
    """

    def __init__(
        self,
        state: SchedulerState,
        admission: Admission,
        displacement: Displacement,
        tenants: TenantShares | None,
    ) -> None:
        config, model, chunk = state.config, state.step_time, state.chunk
        self._state = state
        self._admission = admission
        self._displacement = displacement
        self._tenants = tenants
        share = config.background_share
        self.budget: StepBudget = FixedBudget(model, config.max_num_batched_tokens)
        if config.adaptive_token_budget:
            self.budget = AdaptiveBudget(model, chunk, state.work, config.best_effort_step_s)
        else:
            share = None
        self._bucket = BackgroundBucket(model, share, chunk.tile)
        deadlines = Deadlines(state, self.budget)
        self.feasibility = Feasibility(state, self.budget, deadlines)
        self._ageing = Ageing(state.waiting, config.best_effort_delay_s)

    @property
    def pressing(self) -> bool:
        return self.feasibility.pressing

    def limits(self, now: float, starts: float, *, held: bool) -> PacedLimits:
        state, feasibility = self._state, self.feasibility
        running = state.running.requests
        view = feasibility.settle(starts)
        waiting_favoured = 0
        if self._tenants is not None:
            view, waiting_favoured = self._favour(view, self._tenants)
        allowance = self.budget.allow(view, starts)
        pressure = state.valve.level
        tokens = cap_chunk(allowance.tokens, len(running), pressure)
        background = self._bucket.seconds(view)
        self._ageing.look(now, view)
        limits = PacedLimits(
            state,
            tokens,
            BestEffortTime(allowance.seconds, background, self.budget.best_effort_seconds),
            feasibility,
            self._bucket,
        )
        limits.now = now
        limits.pressure = pressure
        limits.chunk_tokens = allowance.tokens - len(running)
        limits.pressing = feasibility.pressing
        limits.others = feasibility.others(view, now)
        # where the step is too short for all of them, those that run already come first
        left = tokens - len(running) - (view.favoured - waiting_favoured)
        waiting_favoured = max(0, min(waiting_favoured, left))
        limits.reserved = waiting_favoured
        limits.guard = self._guard(view)
        if not held and len(state.waiting):
            feasibility.triage(view, starts)
            if lacking := self._make_way(limits, now):
                limits.reserved = max(waiting_favoured, lacking)
                view = feasibility.hurry(RunningView.of(running))
                limits.guard = self._guard(view)
        if (
            pressure >= Pressure.PREEMPT_BEST_EFFORT
            and view.awaited
            and (view.best_effort or view.must_run)
        ):
            # memory is nearly full and others run: the last of the latest tier goes
            limits.evicted = max(
                view.best_effort or view.must_run, key=lambda request: (request.tier, request.order)
            )
            view = view.without(limits.evicted)
        limits.passes = _passes(view, pressing=limits.pressing)
        return limits

    def rest(self) -> None:
        self.feasibility.rest()
        self._ageing.rest()

    def _guard(self, view: RunningView) -> TpotGuard | None:
        state = self._state
        return TpotGuard(view, state.step_time) if state.config.pace_admission else None

    def _favour(self, view: RunningView, tenants: TenantShares) -> tuple[RunningView, int]:
        """The view with what light tenants lack, and the part of it that waits."""
        head = self._state.waiting.ordinary.peek()
        waiting = self._favourable_tokens(head)
        running = sum(r.num_uncomputed_tokens for r in view.wide if r.favoured)
        return view.sharing(running + waiting, tenants.are_several), waiting

    def _favourable_tokens(self, head: Request | None) -> int:
        """Prompt tokens that a light tenant's request, the first that waits, lacks once it is
        admitted; 0 if it is no such request, or would not be admitted for want of a place or
        memory: others do not make way for it in vain."""
        state = self._state
        running = state.running.requests
        if (
            head is None
            or not head.favoured
            or head.num_pending_tokens
            or len(running) >= state.config.max_num_seqs
            or state.kv.shortfall(head, beside_others=bool(running)) > 0
        ):
            return 0
        if state.config.future_memory_check and running:
            outlook = self._admission.outlook(Tier.ORDINARY)
            if not outlook.admits(head, state.kv.num_in_use(head)):
                return 0
        return state.kv.num_lacking(head)

    def _make_way(self, limits: PacedLimits, now: float) -> int:
        """Preempt running requests that stand in the way of a better waiting one, if any do.
        Returns the tokens which that one lacks, to be kept for it in this step."""
        feasibility = self.feasibility
        head = self._state.waiting.first(pressing=limits.pressing)
        if head is None or (head.best_effort and limits.pressure >= Pressure.HOLD_BEST_EFFORT):
            # it would not be admitted, however many made way
            return 0
        late = feasibility.is_late(head, now)
        yields = late and feasibility.endangers(head, now, limits.others)
        if yields or not limits.allows(head):
            return 0
        displaces = self._displaces_though_late if late else self._state.policy.displaces
        lacking = self._displacement.make_way(head, now, displaces)
        if lacking:
            limits.made_way_for = head
        return lacking

    def _displaces_though_late(self, waiting: Request, running: Request) -> bool:
        """A late request displaces none that has a target to meet."""
        if not running.best_effort and running.targets.aims:
            return False
        return self._state.policy.displaces(waiting, running)


def _passes(view: RunningView, *, pressing: bool) -> tuple[Pass, ...]:
    """Ordinary requests, favoured ones first, then best effort tier by tier."""
    ordinary = view.ordinary
    if view.favoured:
        ordinary = sorted(ordinary, key=lambda request: not request.favoured)
    return (
        Pass(ordinary, list(view.must_run), Tier.ORDINARY),
        *(
            Pass([r for r in view.best_effort if first <= r.tier <= last], [], last)
            for first, last in (_PRESSED if pressing else _BEST_EFFORT)
        ),
    )
