"""Who of those that wait is let in, and who makes way for them.

Admission in the policy's order until something is short: places, memory now or as predicted, the
pace of those that run, room in the step. A head that does not fit may be passed by a bounded number
of others, a bounded number of times.

This module does not know what those that run get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.outlook import MemoryOutlook
from paceline.core.memory.pressure import Pressure
from paceline.core.outputs import NewRequest
from paceline.core.pacing.budget import TokenBudget
from paceline.core.pacing.feasibility import Lateness
from paceline.core.pacing.tpot_guard import PaceGuard
from paceline.core.pacing.view import Survey
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.queues.running import Running
from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request
from paceline.core.step.builder import TILE, Draft
from paceline.core.step.displacement import choose_displaced
from paceline.core.step.rows import Rows
from paceline.core.tier import Tier

__all__ = ["Intake"]

# requests found to be late and passed over at once, at most: the step waits for it
_MAX_RELEGATED: Final = 64


class Intake:
    """Admits waiting requests into drafts. Owned by the planner, with whom it shares what it is
    given."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        kv: KVCacheManager,
        policy: SchedulingPolicy,
        waiting: WaitingRoom,
        running: Running,
        rows: Rows,
        lateness: Lateness,
        step_time: StepTimeModel,
        work: WorkEstimator,
        budget: TokenBudget,
    ) -> None:
        self._config = config
        self._cache = cache
        self._kv = kv
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._rows = rows
        self._lateness = lateness
        self._step_time = step_time
        self._work = work
        self._budget = budget
        self.num_recomputed_tokens = 0
        # of this step
        self._guard = PaceGuard(Survey(), step_time)
        # for whom others were preempted
        self._made_way_for: Request | None = None
        # of ordinary requests, if somebody asked in this step, and preemptions until then
        self._known: tuple[int, MemoryOutlook] | None = None

    def begin(self, survey: Survey) -> None:
        """Take in what runs at the start of a step."""
        self._guard = PaceGuard(survey, self._step_time)

    def favourable_tokens(self, head: Request | None) -> int:
        """Prompt tokens that a light tenant's request, the first that waits, lacks once it is let
        in; 0 if it is no such request, or for want of a place or memory would not be let in, so
        that nobody makes way for it in vain."""
        running = self._running.requests
        self._known = None
        if (
            head is None
            or not head.favoured
            or head.num_pending_tokens
            or len(running) >= self._config.max_num_seqs
            or self._kv.shortfall(head, beside_others=bool(running)) > 0
        ):
            return 0
        if self._config.future_memory_check and running:
            outlook = self._outlook(best_effort=False)
            self._known = self._running.num_preemptions, outlook
            if not outlook.admits(head, self._kv.num_in_use(head)):
                return 0
        return self._kv.num_lacking(head)

    def displace(self, now: float, pressure: Pressure) -> int:
        """Preempt running requests that stand in the way of a better waiting one, if any do.

        Returns the tokens which that one lacks, to be kept for it in this step; 0: nobody went.
        """
        self._made_way_for = None
        head = self._waiting.first()
        if (
            head is None
            or head.num_pending_tokens
            # it would not be let in whoever made way
            or (head.best_effort and pressure >= Pressure.HOLD_BEST_EFFORT)
        ):
            return 0
        late = self._lateness.is_late(head, now)
        if (late and self._lateness.delays_others(head)) or not self._allows(head):
            return 0
        chosen = choose_displaced(
            head,
            self._running.requests,
            self._displaces_though_late if late else self._policy.displaces,
            self._kv,
            self._config.max_num_seqs,
            lambda gone, freed: self._lasts_without(head, gone, freed),
        )
        if not chosen:
            return 0
        # nobody else takes the room that was made for it
        self._made_way_for = head
        head.times_bypassed = self._config.max_bypasses
        for loser in chosen:
            self._running.preempt(loser, now)
        return max(1, self._kv.num_lacking(head))

    def _displaces_though_late(self, head: Request, running: Request) -> bool:
        """Whose first token is late whatever happens delays nobody but best effort for it."""
        return running.best_effort and self._policy.displaces(head, running)

    def _lasts_without(self, head: Request, gone: Sequence[Request], freed: int) -> bool:
        """Whether memory is predicted to last with ``head`` and without some of those that run, who
        give so many blocks back."""
        running = self._running.requests
        if not self._config.future_memory_check or len(gone) == len(running):
            return True
        names = {request.request_id for request in gone}
        rest = [r for r in running if r.request_id not in names]
        outlook = self._outlook_of(rest, head.best_effort, freed)
        # what they alone hold of its prompt comes free with them
        num_shared = self._kv.num_in_use(head, gone)
        if not outlook.admits(head, num_shared):
            return False
        # rows of this step come before it, and take blocks
        num_free = self._kv.pool.num_free + freed - sum(map(self._kv.num_missing, rest))
        outlook.hold(self._cache.num_blocks - num_free)
        return outlook.admits(head, num_shared)

    def let_in(self, draft: Draft, now: float, pressure: Pressure, last: Tier) -> Reason | None:
        """Admit in order until something is short, and return what: ordinary requests, or of best
        effort, up to the first beyond band ``last``."""
        best_effort = last is not Tier.ORDINARY
        passed: list[Request] = []
        head: Request | None = None
        tried = num_late = 0
        outlook: MemoryOutlook | None = None
        held_by: Reason | None = None
        while (request := self._next(draft, pressure, best_effort, passed)) is not None:
            if best_effort and request.tier > last:
                break
            if draft.budget <= 0 or (num_late >= _MAX_RELEGATED and draft.rows):
                held_by = held_by or Reason.BUDGET
                break
            if num_late >= _MAX_RELEGATED and not best_effort:
                # a step without ordinary rows is theirs who were just found to be late
                break
            if len(self._running.requests) >= self._config.max_num_seqs:
                held_by = held_by or Reason.SLOTS
                break
            if request.best_effort and self._running.requests:
                if pressure >= Pressure.HOLD_BEST_EFFORT:
                    held_by = held_by or Reason.PRESSURE
                    break
                if not draft.has_room(request, TILE, self._step_time):
                    held_by = held_by or Reason.BUDGET
                    break
            self._waiting.take(request)
            if request.num_pending_tokens:
                # preempted while its token was being computed: ready once that is known
                passed.append(request)
                continue
            if (
                # if so many were, best effort is let in as it is: somebody has to be
                num_late < _MAX_RELEGATED
                and self._lateness.is_late(request, now)
                and (passed or self._lateness.delays_others(request))
            ):
                self._lateness.relegate(request)
                self._waiting.push(request)
                num_late += 1
                continue
            if outlook is None and self._config.future_memory_check and self._running.requests:
                outlook = self._outlook(best_effort)
            num_shared = 0 if outlook is None else self._kv.num_in_use(request)
            obstacle = self._obstacle(request, outlook, num_shared)
            if obstacle is not None:
                passed.append(request)
                if request.best_effort and not best_effort:
                    # its turn had come, but it holds nobody up
                    continue
                held_by = held_by or obstacle
                head = head or request
                tried += 1
                if (
                    tried > self._config.bypass_window
                    or head.times_bypassed >= self._config.max_bypasses
                ):
                    break
                continue
            if outlook is not None:
                outlook.add(request, num_shared)
            self._admit(draft, request, now)
            if head is not None:
                head.times_bypassed += 1
                if head.times_bypassed >= self._config.max_bypasses:
                    break
        for request in passed:
            self._waiting.push(request)
        return held_by

    def _next(
        self, draft: Draft, pressure: Pressure, best_effort: bool, passed: list[Request]
    ) -> Request | None:
        """Who is tried next: of the kind asked for. A best-effort request that has waited so long
        that its turn has come among the others is tried with them, but never in their way, nor
        before one for whom others were preempted."""
        if best_effort:
            return self._waiting.peek(best_effort=True)
        head = self._waiting.peek(best_effort=False)
        patient = self._waiting.peek(best_effort=True)
        if (
            head is not None
            and patient is not None
            and head is not self._made_way_for
            and patient.order < head.order
            and pressure < Pressure.HOLD_BEST_EFFORT
            and not any(request.best_effort for request in passed)
            and draft.has_room(patient, TILE, self._step_time, self.most_seconds(draft))
        ):
            return patient
        return head

    def most_seconds(self, draft: Draft) -> float:
        """Predicted seconds that a step with the rows so far may take with best effort, or whoever
        comes next would wait for a long step of work without hurry."""
        if not self._step_time.ready:
            return math.inf
        own = self._step_time.predict(draft.shape) - draft.best_effort_cost if draft.rows else 0.0
        return own + self._budget.best_effort_seconds

    def _allows(self, request: Request) -> bool:
        """Whether everybody's tokens stay in time with one more."""
        return not self._config.pace_admission or self._guard.allows(request)

    def _outlook(self, best_effort: bool) -> MemoryOutlook:
        """The running requests' memory; best effort makes way, so others need not count it."""
        if self._known is not None and not best_effort:
            preemptions, known = self._known
            if preemptions == self._running.num_preemptions:
                # rows may have taken blocks since then
                fetched = self._kv.num_fetched_blocks
                known.hold(self._cache.num_blocks - self._kv.pool.num_free - fetched)
                return known
        return self._outlook_of(self._running.requests, best_effort)

    def _outlook_of(
        self, running: Sequence[Request], best_effort: bool, freed: int = 0
    ) -> MemoryOutlook:
        """The same for some of those running, once so many blocks have come free."""
        num_blocks = self._cache.num_blocks
        # what was fetched ahead is nobody's yet
        freed += self._kv.num_fetched_blocks
        return MemoryOutlook(
            [r for r in running if best_effort or not r.best_effort],
            self._work,
            num_blocks=num_blocks,
            num_held_blocks=num_blocks - self._kv.pool.num_free - freed,
            block_size=self._cache.block_size,
        )

    def _obstacle(
        self, request: Request, outlook: MemoryOutlook | None, num_shared: int
    ) -> Reason | None:
        """What keeps a waiting request out; None: nothing does, and it has its blocks now."""
        if not self._running.requests:
            if self._kv.admit(request, beside_others=False):
                return None
            while self._waiting.drop_blocks():
                if self._kv.admit(request, beside_others=False):
                    return None
            return Reason.MEMORY
        if not self._allows(request):
            return Reason.PACE
        if outlook is not None and not outlook.admits(request, num_shared):
            return Reason.MEMORY
        return None if self._kv.admit(request, beside_others=True) else Reason.MEMORY

    def _admit(self, draft: Draft, request: Request, now: float) -> None:
        num_tokens = min(request.num_tokens - request.num_computed_tokens, draft.budget)
        before = draft.shape
        if request.best_effort:
            fitting = draft.fitting(request, self._step_time, self.most_seconds(draft))
            num_tokens = min(num_tokens, fitting)
        extension = self._kv.extend(request, num_tokens)
        assert extension is not None, "admit() promised the blocks"
        if extension.copy is not None:
            draft.copies.append(extension.copy)
        request.times_bypassed = 0
        recomputed = max(0, request.history.num_lost_tokens - request.num_computed_tokens)
        if not request.num_preemptions:
            # nobody is charged twice for a prompt, however much of it a preemption lost
            self._policy.served(request, request.num_tokens - request.num_computed_tokens, 0)
        request.history.num_lost_tokens = 0
        request.history.num_recomputed_tokens += recomputed
        self.num_recomputed_tokens += recomputed
        self._waiting.leave(request, now)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.history.num_found_tokens = request.num_computed_tokens
        self._running.start(request)
        if not request.best_effort:
            self._guard.add(request)
            hurries = request.targets.ttft is not None and self._step_time.ready
            if hurries and self._config.adaptive_token_budget:
                # its prompt is not kept waiting for best-effort rows, as of those that run
                draft.seconds = 0.0
        draft.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=(*request.asked.prompt_token_ids, *request.output_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.asked.sampling,
                block_ids=tuple(request.block_ids),
            )
        )
        self._rows.add(draft, request, num_tokens, ())
        if request.best_effort:
            predict = self._step_time.predict
            draft.best_effort_cost += predict(draft.shape) - predict(before)
