"""The scheduler: events in, frozen plans out.

One call of ``schedule`` hands out at most ``max_num_batched_tokens`` tokens. There is no prefill
and no decode: every request wants ``num_computed_tokens`` to catch up with its tokens, and a
running request that is one token behind costs one token. In order:

1. Displace: if the policy says a waiting request beats running ones that stand in its way, these
   are preempted.
2. Running requests, in the policy's order. Each is sure of one token, so a long prompt cannot
   freeze the others; what is left of the budget goes to whoever is further behind. When the pool
   is empty, one of those not yet served gives its blocks up.
3. Waiting requests, in the policy's order, if nobody was preempted. A head that does not fit may be
   passed by a bounded number of others, a bounded number of times.
4. Best-effort requests come last in both: 2 and 3 again for them, band by band, with what is left;
   but those that stream and would miss a deadline come before new ones that are not best effort.

Counters move when a step is planned, not when it ran, so ``schedule`` may be called again before
``update``: a request whose last token is still unknown is planned by position, and the backend uses
the token it sampled itself.

This module does not know time (``now`` is an argument), tensors, text or transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.outlook import FirstTokenForecast
from paceline.core.memory.pressure import Pressure, PressureValve
from paceline.core.outputs import (
    RequestUpdate,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from paceline.core.pacing.budget import AdaptiveTokenBudget, FixedTokenBudget, TokenBudget
from paceline.core.pacing.door import Admission, Expired, check_door
from paceline.core.pacing.first_token import Prospects
from paceline.core.pacing.tenants import TenantShares
from paceline.core.pacing.view import Survey
from paceline.core.policies import PolicyContext, SchedulingPolicy, make_policy
from paceline.core.predict.output_length import LengthHistory
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.predict.work import WorkEstimator
from paceline.core.queues.forks import Forks
from paceline.core.queues.wait_clocks import REASONS, Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.stats import ClassUse, take_census
from paceline.core.step.builder import Draft
from paceline.core.step.in_flight import StepsInFlight
from paceline.core.step.news import update_of
from paceline.core.step.planner import Planner
from paceline.core.step.update import Results
from paceline.core.tier import Move

__all__ = ["Scheduler"]

# prompt tokens of a step under memory pressure, at least
_MIN_CHUNK = 32


class Scheduler:
    """Decides every step. Single-threaded; every call is deterministic in its arguments.

    Args:
        config: budgets, order and limits.
        cache: size of the KV cache.
        policy: overrides ``config.policy``.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, policy: SchedulingPolicy | None = None
    ) -> None:
        self.config = config
        self.cache = cache
        self.kv = KVCacheManager(cache)
        self.step_time = StepTimeModel()
        self.lengths = LengthHistory()
        work = WorkEstimator(self.step_time, self.lengths)
        self.policy = policy or make_policy(PolicyContext(config, work))
        self.budget: TokenBudget = FixedTokenBudget(self.step_time, config.max_num_batched_tokens)
        if config.adaptive_token_budget:
            self.budget = AdaptiveTokenBudget(
                self.step_time,
                config.max_num_batched_tokens,
                work=work,
                best_effort_step_s=config.best_effort_step_s,
                background_share=config.background_share,
            )
        self.valve = PressureValve(config.pressure_threshold)
        self._admission = Admission(config)
        self._requests: dict[str, Request] = {}
        self._shares = TenantShares()
        # without a reason to tell tenants apart, however many there are make one row
        group = attrgetter("asked.tenant") if self.policy.keeps_tenants_apart else lambda _: ""
        self._waiting = WaitingRoom(self.policy.make_queue, self.kv, self.policy.later, group)
        self._forks = Forks()
        self._planner = Planner(
            config,
            cache,
            kv=self.kv,
            policy=self.policy,
            waiting=self._waiting,
            forks=self._forks,
            step_time=self.step_time,
            work=work,
            budget=self.budget,
        )
        self._running = self._planner.running
        self._steps = StepsInFlight(self.step_time, config.plan_lead_s)
        self._prospects = Prospects(
            FirstTokenForecast(self.step_time, work),
            self._waiting,
            self._running,
            max_num_seqs=config.max_num_seqs,
            tokens_per_step=config.max_num_batched_tokens,
        )
        self._results = Results(self.policy, self._running, self._prospects, self._finish)
        # who was dropped before being started, until somebody asks
        self._expired: list[Expired] = []
        # the policy holds all waiting requests back until then; None: it does not
        self.wake_at: float | None = None
        self._num_added = 0
        self._num_steps = 0
        self._num_discarded_tokens = 0

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it at the door.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_door``.
            QueueFullError: it cannot be served soon, see ``Admission.check``.
        """
        check_door(request, self._requests, self.config, self.cache)
        if self.policy.keeps_tenants_apart and self._shares.is_light(request.asked.tenant):
            request.move(Move.FAVOUR)
        if request.asked.fork_of is None:
            waiting = len(self._waiting) + len(self._forks)
            if not self._admission.is_full(waiting, request.asked.num_forks):
                self.kv.hash_prompt(request)
                request.num_new_tokens -= self.kv.num_found(request)
            self._prospects.note(request)
            own = 0
            if (
                self.policy.keeps_tenants_apart
                and self._admission.is_crowded(waiting, request.asked.num_forks)
                and self._shares.has_others(request.asked.tenant)
            ):
                own = self._num_waiting_of(request.asked.tenant) + request.asked.num_forks
            self._admission.check(
                waiting,
                request.history.predicted_ttft,
                self.valve.level,
                own,
                num_forks=request.asked.num_forks,
            )
        request.order = (self.policy.key(request), self._num_added)
        self._num_added += 1
        if request.asked.fork_of is None:
            self._admission.limit(request)
        self._requests[request.request_id] = request
        self._shares.came(request.asked.tenant)
        if request.asked.fork_of is None:
            self._waiting.arrive(request)
            return
        parent = self._requests[request.asked.fork_of]
        if (
            parent.status is RequestStatus.RUNNING
            and parent.num_computed_tokens >= parent.num_prompt_tokens
        ):
            self.kv.fork(parent, request)
            self._waiting.arrive(request)
        else:
            self._forks.add(parent, request)

    def _num_waiting_of(self, tenant: str) -> int:
        running = sum([r.asked.tenant == tenant for r in self._running.requests])
        return self._shares.unfinished(tenant) - running

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> tuple[RequestUpdate, ...]:
        """End requests now and free their blocks; unknown ids are ignored. ``reason`` is STOP where
        the answer is whole: a stop string was found in it."""
        updates = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, reason)
                updates.append(update_of(request, (), None))
        return tuple(updates)

    def take_expired(self) -> tuple[Expired, ...]:
        """Requests that ``schedule`` dropped before they were started, once each."""
        expired = tuple(self._expired)
        self._expired.clear()
        return expired

    def _drop_expired(self, now: float) -> None:
        dropped: list[tuple[Request, tuple[Request, ...]]] = []
        for request in self._admission.expired(now):
            if (
                request.first_scheduled_time is None
                and self._requests.get(request.request_id) is request
                and request.status is RequestStatus.WAITING
            ):
                forks = self._forks.of(request)
                for each in (*forks, request):
                    self._finish(each, FinishReason.ABORT)
                dropped.append((request, forks))
        for request, forks in dropped:
            # once none of them waits any more, or it would wait for itself
            predicted = self._prospects.predict(request)
            self._expired.append(self._admission.expiry(request, forks, now, predicted))

    # ------------------------------------------------------------------ plans out

    @property
    def plan_at(self) -> float:
        """When the next step is best planned while one runs: as late as can be, so that whoever
        arrives until then is in it, and yet before the one that runs has ended. Minus infinity:
        at once."""
        return self._steps.plan_at

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step and move the counters as if it had run.

        An empty plan (no rows) is not to be executed and not to be passed to ``update``.
        """
        running = self._running.requests
        self._waiting.begin_plan(now)
        self._drop_expired(now)
        self._waiting.make_room(beside_others=bool(running))
        # what was fetched ahead can be had back at once
        num_free = self.kv.pool.num_free + self.kv.num_fetched_blocks
        pressure = self.valve.update(1.0 - num_free / self.cache.num_blocks)
        starts = self._steps.starts(now)
        survey = self._survey(starts)
        allowance = self.budget.allow(survey, starts)
        self._prospects.tokens_per_step = chunk = allowance.tokens - len(running)
        draft = Draft(allowance)
        if pressure >= Pressure.SMALL_CHUNKS:
            draft.budget = min(draft.budget, len(running) + max(_MIN_CHUNK, chunk // 4))
        self.wake_at = self.policy.holds_until(self._waiting.ordinary, len(running), now)
        held_by = self._planner.fill(
            draft, survey, now, starts=starts, held=self.wake_at is not None, pressure=pressure
        )
        held_by = held_by if len(self._waiting) else None
        self._prospects.held_by = held_by
        self._waiting.clocks.note(held_by, now)
        if not draft.rows:
            return SchedulerOutput(self._num_steps, (), (), (), (), 0)
        if held_by is not None and held_by is not Reason.PRESSURE:
            self._waiting.prefetch(len(running), self.config.max_num_batched_tokens)
        plan = SchedulerOutput(
            self._num_steps,
            tuple(draft.rows),
            tuple(draft.new),
            tuple(draft.copies),
            tuple(self._running.released),
            draft.num_tokens,
            *self.kv.take_swaps(),
        )
        self._num_steps += 1
        self._running.released.clear()
        self._steps.push(plan.step_id, draft.requests, draft.shape, starts)
        self._prospects.forget()
        return plan

    def _survey(self, starts: float) -> Survey:
        """What runs, once those of it who are late have made way."""
        running = self._running.requests
        survey = Survey.of(running)
        lateness = self._planner.lateness
        moved = lateness.relegate_running(running, survey.wide, starts)
        if lateness.keep_deadlines(running, survey, starts) or moved:
            survey = Survey.of(running)
        lateness.hurry(survey)
        if self.policy.keeps_tenants_apart:
            head = self._waiting.ordinary.peek()
            survey.favour(self._planner.intake.favourable_tokens(head))
            survey.shared = self._shares.are_several
        return survey

    # ------------------------------------------------------------------ results in

    def update(
        self, plan: SchedulerOutput, result: StepResult, now: float, *, tell_all: bool = True
    ) -> tuple[RequestUpdate, ...]:
        """Take in what a step sampled; plans are updated in the order they were made.

        Tokens of requests that ended meanwhile are dropped. ``tell_all=False`` returns the news of
        requests that ended alone: a simulator has nobody to stream tokens to.
        """
        self._prospects.forget()
        requests = self._steps.pop(plan, result, now)
        return self._results.take_in(plan, requests, result, now, tell_all=tell_all)

    def _finish(self, request: Request, reason: FinishReason, *, prune: bool = True) -> None:
        """End a request and free its blocks; ``prune`` takes it out of the running list too."""
        self._prospects.forget()
        if request.status is RequestStatus.RUNNING:
            self._running.released.append(request.request_id)
            if prune:
                self._running.requests.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._forks.remove(request)
        for child in self._forks.take(request):
            # it stands on its own: nothing of it was started
            self._waiting.arrive(child)
            self._admission.limit(child)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        failed = reason is FinishReason.ERROR or reason is FinishReason.ABORT
        if failed and request.first_scheduled_time is not None:
            computed = max(request.num_computed_tokens, request.history.num_lost_tokens)
            self._num_discarded_tokens += max(0, computed - request.history.num_found_tokens)
        self.kv.end(request, forget=reason is FinishReason.ERROR)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.lengths.observe(request.label, request.num_tokens - request.num_prompt_tokens)
        del self._requests[request.request_id]
        self._shares.went(request.asked.tenant)
        if not self._requests:
            self._rest()

    def _rest(self) -> None:
        """Nobody is left, and it may be long until a step is planned again: what the last plan saw
        of memory and of those who waited is over."""
        self.valve.update(0.0)
        self._waiting.rest()
        self._planner.lateness.rest()
        self._prospects.held_by = None

    # ------------------------------------------------------------------ views

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        deferred = len(self._forks)
        held_by = self._prospects.held_by
        return SchedulerStats(
            num_running=len(self._running.requests),
            num_waiting=len(self._waiting) + deferred,
            num_waiting_capacity=len(self._waiting),
            num_waiting_deferred=deferred,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=self.kv.pool.num_free,
            num_preemptions=self._running.num_preemptions,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            num_recomputed_tokens=self._planner.intake.num_recomputed_tokens,
            num_swapped_out_blocks=self.kv.num_swapped_out,
            num_swapped_in_blocks=self.kv.num_swapped_in,
            num_relegated=self._planner.lateness.num_relegated,
            num_discarded_tokens=self._num_discarded_tokens,
            refused=tuple(self._admission.refused.items()),
            waited=tuple(zip(REASONS, self._waiting.clocks.reading(), strict=True)),
            pressure_level=self.valve.level,
            predicted_step_seconds=self._steps.predicted_seconds,
            actual_step_seconds=self._steps.actual_seconds,
            num_prefill_tokens=self._steps.num_prefill_tokens,
            num_decode_tokens=self._steps.num_decode_tokens,
            num_cached_free_blocks=self.kv.pool.num_cached_free,
            num_host_blocks=self.cache.num_host_blocks,
            num_free_host_blocks=self.kv.num_free_host_blocks,
            held_by=None if held_by is None else REASONS[held_by],
        )

    def census(self) -> tuple[ClassUse, ...]:
        """Who runs and waits now, by SLO class; takes too long for every step."""
        return take_census(self._running.requests, chain(self._waiting, self._forks))

    def check_integrity(self) -> None:
        """AssertionError unless every invariant of scheduler, queue, tables and pool holds."""
        forks = list(self._forks)
        running = self._running.requests
        known = [*running, *self._waiting, *forks]
        assert len(known) == len(self._requests), "a request is lost or in two places"
        assert {id(r) for r in known} == {id(r) for r in self._requests.values()}
        assert len(running) <= self.config.max_num_seqs, "too many requests run"
        assert running == sorted(running, key=lambda r: r.order), "running is out of order"
        for request in running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens
        for request in [*self._waiting, *forks]:
            assert request.status is RequestStatus.WAITING
            assert not request.block_ids or request.asked.fork_of or request.num_swapped_tokens
        for request in known:
            flying = self._steps.num_rows(request)
            assert 0 <= request.num_pending_tokens <= flying, "a pending token of no step"
            assert request.num_tokens + request.num_pending_tokens <= request.max_total_tokens
        for fork in forks:
            assert fork.asked.fork_of in self._requests, "a fork waits for nobody"
        self._waiting.check_integrity()
        self.kv.check_integrity(known)
