"""One step's rows: who runs, who is let in, who has to go.

The stages are told in ``scheduler``. State lives in what the planner is given; it keeps none of its
own from one step to the next but counters.

This module does not know how requests come and end, nor what a step brings.
"""

from __future__ import annotations

import math
from bisect import insort
from operator import attrgetter

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.displacement import choose_displaced
from paceline.core.draft import Draft
from paceline.core.forecast import MemoryOutlook
from paceline.core.forks import Forks
from paceline.core.kv_cache import KVCacheManager
from paceline.core.lateness import Lateness
from paceline.core.outputs import NewRequest, ScheduledRow
from paceline.core.pace import PaceGuard
from paceline.core.policies import SchedulingPolicy
from paceline.core.preemption import Preemption
from paceline.core.pressure import Pressure
from paceline.core.request import Band, Request, RequestStatus
from paceline.core.step_time import StepTimeModel
from paceline.core.survey import Survey
from paceline.core.token_budget import TokenBudget
from paceline.core.waiting import WaitingRoom
from paceline.core.waits import Reason
from paceline.core.work import WorkEstimator

__all__ = ["Planner"]

_ORDER = attrgetter("order")
# see draft.py
_new = tuple.__new__
# tokens for which there must be room to let a best-effort request in
_TILE = 16
# best-effort requests by band, lowest and highest: who gets rows and is let in together, in order
_BANDS = ((Band.PROMISED, Band.RELEGATED), (Band.BACKGROUND, Band.BACKGROUND))
_PRESSED = tuple((band, band) for band in Band if band is not Band.ORDINARY)
# requests found to be late and passed over in one step at most
_MAX_RELEGATED = 64


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
        self._config = config
        self._cache = cache
        self._kv = kv
        self._policy = policy
        self._waiting = waiting
        self._forks = forks
        self._step_time = step_time
        self._work = work
        self._budget = budget
        self._preemption = Preemption(config, cache, kv, work)
        self.lateness = Lateness(
            enabled=config.relegate_late,
            policy=policy,
            waiting=waiting,
            step_time=step_time,
            work=work,
            budget=budget,
        )
        # sorted by order
        self.running: list[Request] = []
        # requests whose backend state is to be dropped by the next plan
        self.released: list[str] = []
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        # of this step
        self._guard = PaceGuard(Survey(), step_time)

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
        self._guard = PaceGuard(survey, self._step_time)
        # a light tenant's prompt is not cut short by prompts that came before it
        reserved = survey.favoured_waiting
        if not held and self._waiting:
            self.lateness.triage(survey, starts)
            if self._displace(now):
                survey = Survey.of(self.running)
                self._guard = PaceGuard(survey, self._step_time)
        if not self._policy.mixes:
            self._choose_kind(draft, held)
        running = self.running
        others = len(survey.best_effort)
        if pressure >= Pressure.PREEMPT_BEST_EFFORT and survey.ordinary and others:
            self._preempt(max(survey.best_effort, key=lambda r: (r.band, r.order)), now)
            others -= 1
        preempted = self._run(draft, survey.ordinary, others + reserved, now)
        held_by: Reason | None = Reason.POLICY if held or not draft.wide else None
        if held_by is None and preempted and running:
            held_by = Reason.MEMORY
        if held_by is None and self._waiting:
            draft.budget -= others
            held_by = self._let_in(draft, now, pressure, Band.ORDINARY)
            draft.budget += others
        draft.seconds = min(draft.seconds, self._most_seconds(draft))
        bands = _PRESSED if self._waiting.pressing else _BANDS
        for low, high in bands if others or self._waiting else ():
            # those that ran before: whoever was let in just now has a row
            rest = [r for r in survey.best_effort if r.status is RequestStatus.RUNNING]
            those = [r for r in rest if low <= r.band <= high]
            left = sum(r.band > high for r in rest)
            late = self._run(draft, those, left, now) if those else False
            if held_by is None and late and running:
                held_by = Reason.MEMORY
            head = self._waiting.peek(best_effort=True)
            if held_by is None and head is not None and head.band <= high:
                draft.budget -= left
                held_by = self._let_in(draft, now, pressure, high)
                draft.budget += left
        if not draft.rows and not draft.narrow:
            # no wide row could be had after all (memory): do not waste the step
            draft.narrow = True
            rest = [r for r in running if r.slo.best_effort]
            self._run(draft, [r for r in running if not r.slo.best_effort], len(rest), now)
            self._run(draft, [r for r in running if r.slo.best_effort], 0, now)
        for child in draft.forked:
            self._waiting.enter(child, now)
        if draft.background_cost:
            self._budget.charge(draft.background_cost)
        return held_by

    def favourable_tokens(self, head: Request | None) -> int:
        """Prompt tokens that a light tenant's request, the first that waits, lacks once it is let
        in; 0 if it is no such request, or for want of a place or memory would not be let in, so
        that nobody makes way for it in vain."""
        if (
            head is None
            or not head.favoured
            or head.num_pending_tokens
            or len(self.running) >= self._config.max_num_seqs
            or self._kv.shortfall(head, beside_others=bool(self.running)) > 0
        ):
            return 0
        if self._config.future_memory_check and self.running:
            outlook = self._outlook(best_effort=False)
            if not outlook.admits(head, self._kv.num_in_use(head)):
                return 0
        return self._kv.num_lacking(head)

    # ------------------------------------------------------------------ those running

    def _choose_kind(self, draft: Draft, held: bool) -> None:
        """For a policy that does not mix: wide rows while there are any to compute."""
        draft.wide = any(r.num_uncomputed_tokens > 1 for r in self.running)
        if not draft.wide and not held:
            head = self._waiting.first()
            draft.wide = not self.running or (
                head is not None
                and len(self.running) < self._config.max_num_seqs
                and self._kv.shortfall(head, beside_others=True) == 0
            )
        draft.narrow = not draft.wide

    def _run(self, draft: Draft, running: list[Request], others: int, now: float) -> bool:
        """Rows for ``running``, in order, leaving a token for each of ``others``. Whoever has to
        give way is taken out of the list. Returns whether anybody had to."""
        preempted = False
        block_size = self._cache.block_size
        rows, requests = draft.rows, draft.requests
        pool = self._kv.pool
        plain = self._policy.mixes and draft.seconds == math.inf and not self._forks
        if running and running[0].slo.best_effort:
            plain = plain and draft.background_seconds == math.inf
        caching = self._cache.enable_prefix_caching
        # such plain rows that the draft does not count yet, and the keys before them
        handed_out = handed_keys = 0
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            pending = request.num_pending_tokens
            total = request.num_tokens + pending
            held = len(request.block_ids) * block_size
            if (
                plain
                and total - computed == 1
                and total < request.max_total_tokens
                and not request.shares_tail
                and (computed < held or pool.num_free)
            ):
                # what most rows of most steps are, by the shortest way: the rest of this loop would
                # do the same
                block_ids: tuple[int, ...] = ()
                if computed == held:
                    block_ids = tuple(pool.allocate(1))
                    request.block_ids += block_ids
                rows.append(_new(ScheduledRow, (request.request_id, computed, 1, block_ids, True)))
                requests.append(request)
                handed_out += 1
                handed_keys += computed
                request.num_computed_tokens = total
                request.num_pending_tokens = pending + 1
                if caching and total // block_size > request.num_hashed_blocks:
                    self._kv.cache_computed(request)
                index += 1
                continue
            draft.count_plain(handed_out, handed_keys)
            handed_out = handed_keys = 0
            if (
                # nothing left to compute, or only to wait for the last token
                total == computed
                or total >= request.max_total_tokens
                or not self._takes(draft, request, total - computed)
            ):
                index += 1
                continue
            num_tokens = total - computed
            if num_tokens > 1:
                reserved = len(running) - index - 1 + others
                num_tokens = max(1, min(num_tokens, draft.budget - reserved))
                if request.slo.best_effort:
                    num_tokens = min(num_tokens, draft.fitting(request, self._step_time))
            new_block_ids: tuple[int, ...] = ()
            if request.shares_tail or computed + num_tokens > held:
                extension = self._kv.extend(request, num_tokens)
                while extension is None:
                    preempted = True
                    if not self._waiting.drop_blocks():
                        victim = self._victim(draft, running, index)
                        self._preempt(victim, now)
                        if victim in running:
                            running.remove(victim)
                        if victim is request:
                            break
                    extension = self._kv.extend(request, num_tokens)
                if extension is None:
                    continue
                new_block_ids = extension.new_block_ids
                if extension.copy is not None:
                    draft.copies.append(extension.copy)
            self._add_row(draft, request, num_tokens, new_block_ids)
            index += 1
        draft.count_plain(handed_out, handed_keys)
        return preempted

    def _takes(self, draft: Draft, request: Request, wanted: int) -> bool:
        """Whether a running request gets a row: always, but for a policy that does not mix and
        for best-effort requests that would make the step too long for the others."""
        if not self._policy.mixes:
            return draft.narrow if wanted == 1 else draft.wide
        return not request.slo.best_effort or draft.spares(request, self._step_time)

    def _victim(self, draft: Draft, running: list[Request], index: int) -> Request:
        """Who gives blocks up for ``running[index]``: nobody who has a row already, and of
        ``running`` nobody who comes before it."""
        candidates = running[index:]
        band = running[index].band
        if band is not Band.BACKGROUND:
            taken = {request.request_id for request in [*draft.requests, *running]}
            candidates += [r for r in self.running if r.band > band and r.request_id not in taken]
        return self._preemption.victim(candidates, self._policy.expendable)

    def _preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; it waits again at its place in the order."""
        self.num_preemptions += 1
        self._preemption.release(request)
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.running.remove(request)
        self.released.append(request.request_id)
        self._waiting.enter(request, now)

    def _displace(self, now: float) -> bool:
        """Preempt running requests that stand in the way of a better waiting one, if any do."""
        head = self._waiting.first()
        if (
            head is None
            or head.num_pending_tokens
            # it would not be let in whoever made way
            or self.lateness.is_late(head, now)
            or not self._allows(head)
        ):
            return False
        chosen = choose_displaced(
            head, self.running, self._policy.displaces, self._kv, self._config.max_num_seqs
        )
        if chosen:
            # nobody else takes the room that was made for it
            head.times_bypassed = self._config.max_bypasses
        for loser in chosen:
            self._preempt(loser, now)
        return bool(chosen)

    # ------------------------------------------------------------------ those waiting

    def _let_in(self, draft: Draft, now: float, pressure: Pressure, last: Band) -> Reason | None:
        """Admit in order until something is short, and return what: ordinary requests, or of best
        effort, up to the first beyond band ``last``."""
        best_effort = last is not Band.ORDINARY
        passed: list[Request] = []
        head: Request | None = None
        tried = num_late = 0
        outlook: MemoryOutlook | None = None
        held_by: Reason | None = None
        while (request := self._next(draft, pressure, best_effort, passed)) is not None:
            if best_effort and request.band > last:
                break
            if draft.budget <= 0 or (num_late >= _MAX_RELEGATED and draft.rows):
                held_by = held_by or Reason.BUDGET
                break
            if len(self.running) >= self._config.max_num_seqs:
                held_by = held_by or Reason.SLOTS
                break
            if request.slo.best_effort and self.running:
                if pressure >= Pressure.HOLD_BEST_EFFORT:
                    held_by = held_by or Reason.PRESSURE
                    break
                if not draft.has_room(request, _TILE, self._step_time):
                    held_by = held_by or Reason.BUDGET
                    break
            self._waiting.take(request)
            if request.num_pending_tokens:
                # preempted while its token was being computed: ready once that is known
                passed.append(request)
                continue
            if self.lateness.is_late(request, now):
                self.lateness.relegate(request)
                self._waiting.push(request)
                num_late += 1
                continue
            if outlook is None and self._config.future_memory_check and self.running:
                outlook = self._outlook(best_effort)
            num_shared = 0 if outlook is None else self._kv.num_in_use(request)
            obstacle = self._obstacle(request, outlook, num_shared)
            if obstacle is not None:
                passed.append(request)
                if request.slo.best_effort and not best_effort:
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
        that its turn has come among the others is tried with them, but never in their way."""
        if best_effort:
            return self._waiting.peek(best_effort=True)
        head = self._waiting.peek(best_effort=False)
        patient = self._waiting.peek(best_effort=True)
        if (
            head is not None
            and patient is not None
            and patient.order < head.order
            and pressure < Pressure.HOLD_BEST_EFFORT
            and not any(request.slo.best_effort for request in passed)
            and draft.has_room(patient, _TILE, self._step_time, self._most_seconds(draft))
        ):
            return patient
        return head

    def _most_seconds(self, draft: Draft) -> float:
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
        return MemoryOutlook(
            [r for r in self.running if best_effort or not r.slo.best_effort],
            self._work,
            num_blocks=self._cache.num_blocks,
            num_held_blocks=self._cache.num_blocks - self._kv.pool.num_free,
            block_size=self._cache.block_size,
        )

    def _obstacle(
        self, request: Request, outlook: MemoryOutlook | None, num_shared: int
    ) -> Reason | None:
        """What keeps a waiting request out; None: nothing does, and it has its blocks now."""
        if not self.running:
            if self._kv.admit(request, beside_others=False):
                return None
            if self._waiting.drop_blocks() and self._kv.admit(request, beside_others=False):
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
        if request.slo.best_effort:
            fitting = draft.fitting(request, self._step_time, self._most_seconds(draft))
            num_tokens = min(num_tokens, fitting)
        extension = self._kv.extend(request, num_tokens)
        assert extension is not None, "admit() promised the blocks"
        if extension.copy is not None:
            draft.copies.append(extension.copy)
        request.status = RequestStatus.RUNNING
        request.times_bypassed = 0
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        # nobody is charged twice for what a preemption lost
        uncomputed = request.num_tokens - request.num_computed_tokens
        self._policy.served(request, uncomputed - recomputed, 0)
        request.num_lost_tokens = 0
        request.num_recomputed_tokens += recomputed
        self.num_recomputed_tokens += recomputed
        self._waiting.leave(request, now)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        insort(self.running, request, key=_ORDER)
        if not request.slo.best_effort:
            self._guard.add(request)
            hurries = request.slo.ttft is not None and self._step_time.ready
            if hurries and self._config.adaptive_token_budget:
                # its prompt is not kept waiting for best-effort rows, as of those that run
                draft.seconds = 0.0
        draft.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=(*request.prompt_token_ids, *request.output_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_ids=tuple(request.block_ids),
            )
        )
        self._add_row(draft, request, num_tokens, ())
        if request.slo.best_effort:
            predict = self._step_time.predict
            draft.best_effort_cost += predict(draft.shape) - predict(before)

    def _add_row(
        self, draft: Draft, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]
    ) -> None:
        before = draft.shape
        draft.add(request, num_tokens, new_block_ids)
        if draft.background_seconds < math.inf and request.slo.background:
            predict = self._step_time.predict
            draft.background_cost += predict(draft.shape) - predict(before)
        end = request.num_computed_tokens
        if end // self._cache.block_size > request.num_hashed_blocks:
            self._kv.cache_computed(request)
        if self._forks and end >= request.num_prompt_tokens:
            for child in self._forks.take(request):
                self._kv.fork(request, child)
                draft.forked.append(child)
