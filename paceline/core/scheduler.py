"""The scheduler: events in, frozen plans out.

One call of ``schedule`` hands out at most ``max_num_batched_tokens`` tokens. There is no prefill
and no decode: every request wants ``num_computed_tokens`` to catch up with its tokens, and a
running request that is one token behind costs one token. In order:

1. *Limits* (``step.limits``): what the step may do. Without targets that is a number of tokens;
   with targets, ``pacing`` settles which requests yield to which, and how long the step may take.
2. *Rows* (``step.rows``) for running requests, in the policy's order. Each is sure of one token, so
   a long prompt cannot freeze the others; what is left of the tokens goes to requests that are
   further behind. When the pool is empty, one of those not yet served gives its blocks up.
3. *Admission* (``step.admission``) of waiting requests, in the policy's order, if none was
   preempted. A head that does not fit may be passed by a bounded number of others, a bounded number
   of times.
4. Best-effort requests come last in both: 2 and 3 again for them, tier by tier, with what is left.

Counters move when a step is planned, not when it ran, so ``schedule`` may be called again before
``update``: a request whose last token is still unknown is planned by position, and the backend uses
the token it sampled itself.

This module does not know time (``now`` is an argument), tensors, text or transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.offload import Offload
from paceline.core.memory.outlook import Outlooks
from paceline.core.memory.preemption import Preemption
from paceline.core.memory.pressure import PressureValve
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepResult
from paceline.core.pacing.door import Door, Expired
from paceline.core.pacing.paced import Paced
from paceline.core.pacing.tenants import TenantShares
from paceline.core.policies import PolicyContext, SchedulingPolicy, make_policy
from paceline.core.predict.chunk import ChunkSize
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.forks import Forks
from paceline.core.queues.running import RunningList
from paceline.core.queues.wait_clocks import REASONS, Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.stats import ClassUse, SchedulerStats, take_census
from paceline.core.step.admission import Admission
from paceline.core.step.builder import StepBuilder
from paceline.core.step.displacement import Displacement
from paceline.core.step.in_flight import StepsInFlight
from paceline.core.step.limits import Pacing, Plain
from paceline.core.step.planner import Planner
from paceline.core.step.rows import Rows
from paceline.core.step.state import LastPlan, SchedulerState
from paceline.core.step.update import Updates, update_of

__all__ = ["Scheduler"]

# waiting requests whose swapped blocks may be fetched ahead, those that come next
_LOOK_AHEAD: Final = 16


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
        self.step_time = StepTimeModel()
        self.lengths = LengthHistory()
        self.valve = PressureValve(config.pressure_threshold)
        self._state = state = self._make_state(policy)
        self.policy, self.kv = state.policy, state.kv
        self._waiting, self._forks, self._running = state.waiting, state.forks, state.running
        # without a reason to tell tenants apart they are not counted
        self._tenants = TenantShares() if self.policy.keeps_tenants_apart else None
        self._door = Door(state, self.valve, self._tenants)
        rows, outlooks = Rows(state), Outlooks(self.kv, state.work)
        self._admission = Admission(state, rows, outlooks)
        self._planner = Planner(state, rows, self._admission)
        displacement = Displacement(state, outlooks)
        chunk = ChunkSize(
            self.step_time, config.max_num_batched_tokens, adaptive=config.adaptive_token_budget
        )
        self._plain = Plain(state, chunk, displacement, self.valve)
        self._paced = Paced(state, chunk, self.valve, self._admission, displacement, self._tenants)
        self._pacing: Pacing = self._plain
        self._steps, self._last = state.steps, state.last
        self._updates = Updates(self.policy, self._running, state.last, self._finish)
        self._requests: dict[str, Request] = {}
        # requests dropped before they were started, until they are asked for
        self._expired: list[Expired] = []
        # the policy holds all waiting requests back until then; None: it does not
        self.wake_at: float | None = None
        self._num_added = 0
        self._num_steps = 0
        self._num_discarded_tokens = 0
        self._rest()

    def _make_state(self, policy: SchedulingPolicy | None) -> SchedulerState:
        config, cache = self.config, self.cache
        kv = KVCacheManager(cache)
        work = WorkEstimator(self.step_time, self.lengths)
        policy = policy or make_policy(PolicyContext(config, work))
        # where tenants are not kept apart, all requests make one row
        group = attrgetter("asked.tenant") if policy.keeps_tenants_apart else lambda _: ""
        waiting = WaitingRoom(policy.make_queue, policy.later, Offload(kv), group)
        preemption = Preemption(config, cache, kv, work)
        return SchedulerState(
            config=config,
            cache=cache,
            policy=policy,
            step_time=self.step_time,
            work=work,
            kv=kv,
            waiting=waiting,
            forks=Forks(),
            running=RunningList(preemption, waiting, cache.block_size),
            steps=StepsInFlight(self.step_time, config.plan_lead_s),
            last=LastPlan(config.max_num_batched_tokens),
        )

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it at the door.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_door``.
            QueueFullError: it cannot be served soon, see ``QueueLimits.check``.
        """
        self._door.check(request, self._requests)
        request.order = (self.policy.key(request), self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        if self._tenants is not None:
            self._tenants.came(request.asked.tenant)
        if request.targets.aims or request.best_effort:
            self._pacing = self._paced
        if request.asked.fork_of is None:
            self._door.limits.limit(request)
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
        for request in self._door.limits.expired(now):
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
            self._expired.append(self._door.expiry(request, forks, now))

    # ------------------------------------------------------------------ plans out

    @property
    def plan_at(self) -> float:
        """When the next step is best planned while one runs: as late as can be, so that requests
        which arrive until then are in it, and yet before the one that runs has ended. Minus
        infinity: at once."""
        return self._steps.plan_at

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step and move the counters as if it had run.

        An empty plan (no rows) is not to be executed and not to be passed to ``update``.
        """
        running = self._running.requests
        self._waiting.begin_plan(now)
        if now >= self._door.limits.next_expiry:
            self._drop_expired(now)
        if self.valve.threshold < 1.0 or self.kv.num_fetched_blocks:
            self._relieve(beside_others=bool(running))
        starts = self._steps.starts(now)
        self.wake_at = self.policy.holds_until(self._waiting.ordinary, len(running), now)
        held = self.wake_at is not None
        limits = self._pacing.limits(now, starts, held=held)
        step = StepBuilder(limits.tokens)
        held_by = self._planner.fill(step, limits, now, held=held)
        held_by = held_by if len(self._waiting) else None
        self._waiting.clocks.note(held_by, now)
        self._last.held_by, self._last.chunk_tokens = held_by, limits.chunk_tokens
        if not step.rows:
            self._steps.note_ordinary(starts, 0.0)
            return SchedulerOutput(self._num_steps, (), (), (), (), 0)
        if held_by is not None and held_by is not Reason.PRESSURE:
            self._fetch_ahead(len(running))
        plan = SchedulerOutput(
            self._num_steps,
            tuple(step.rows),
            tuple(step.new),
            tuple(step.copies),
            self._running.take_released(),
            step.num_tokens,
            *self.kv.take_swaps(),
        )
        self._num_steps += 1
        shape = step.shape
        seconds = self.step_time.predict(shape)
        self._steps.push(
            plan.step_id, step.requests, shape, starts, seconds, limits.ordinary_seconds
        )
        self._last.version += 1
        return plan

    def _relieve(self, *, beside_others: bool) -> None:
        """Take blocks that were fetched ahead back if the first waiting request lacks them, and see
        how full memory is without them."""
        kv = self.kv
        if kv.num_fetched_blocks:
            head = self._waiting.first(pressing=self._pacing.pressing)
            if head is not None:
                self._waiting.offload.make_room(head, beside_others=beside_others)
        num_free = kv.pool.num_free + kv.num_fetched_blocks
        self.valve.update(1.0 - num_free / self.cache.num_blocks)

    def _fetch_ahead(self, num_running: int) -> None:
        """Fetch the swapped blocks of the requests that come next, with a block to spare for each
        running one."""
        offload = self._waiting.offload
        if offload.has_swapped:
            upcoming = self._waiting.upcoming(_LOOK_AHEAD)
            offload.prefetch(upcoming, num_running, self.config.max_num_batched_tokens)

    # ------------------------------------------------------------------ results in

    def update(
        self, plan: SchedulerOutput, result: StepResult, now: float, *, tell_all: bool = True
    ) -> tuple[RequestUpdate, ...]:
        """Take in what a step sampled; plans are updated in the order they were made.

        Tokens of requests that ended meanwhile are dropped. ``tell_all=False`` returns the news of
        requests that ended alone: a simulator streams tokens to no caller.
        """
        self._last.version += 1
        requests = self._steps.pop(plan, result, now)
        return self._updates.take_in(plan, requests, result, now, tell_all=tell_all)

    def _finish(self, request: Request, reason: FinishReason, *, prune: bool = True) -> None:
        """End a request and free its blocks; ``prune`` takes it out of the running list too."""
        self._last.version += 1
        if request.status is RequestStatus.RUNNING:
            self._running.stop(request, prune=prune)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._forks.remove(request)
        for child in self._forks.take(request):
            # it stands on its own: nothing of it was started
            self._waiting.arrive(child)
            self._door.limits.limit(child)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        failed = reason is FinishReason.ERROR or reason is FinishReason.ABORT
        if failed and request.first_scheduled_time is not None:
            history = request.history
            computed = max(request.num_computed_tokens, history.num_lost_tokens)
            self._num_discarded_tokens += max(0, computed - history.num_found_tokens)
        self.kv.end(request, forget=reason is FinishReason.ERROR)
        if not failed:
            self.lengths.observe(request.label, request.num_output_tokens)
        del self._requests[request.request_id]
        if self._tenants is not None:
            self._tenants.went(request.asked.tenant)
        if not self._requests:
            self._rest()

    def _rest(self) -> None:
        """No request is left, and it may be long until a step is planned again: what the last plan
        saw of memory and of requests is over."""
        self.valve.update(0.0)
        self._waiting.rest()
        self._paced.rest()
        self._door.limits.rest()
        self._last.held_by = None
        # requests without targets need no pacing, unless something is kept of all of them
        if self._tenants is None and self.config.background_share is None:
            self._pacing = self._plain
        else:
            self._pacing = self._paced

    # ------------------------------------------------------------------ views

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        """A snapshot, cheap enough to take every step."""
        kv, steps, deferred = self.kv, self._steps, len(self._forks)
        return SchedulerStats(
            num_running=len(self._running.requests),
            num_waiting=len(self._waiting) + deferred,
            num_waiting_capacity=len(self._waiting),
            num_waiting_deferred=deferred,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=kv.pool.num_free,
            num_preemptions=self._running.num_preemptions,
            prefix_cache_queries=kv.num_queried_tokens,
            prefix_cache_hits=kv.num_hit_tokens,
            num_recomputed_tokens=self._admission.num_recomputed_tokens,
            num_swapped_out_blocks=kv.num_swapped_out,
            num_swapped_in_blocks=kv.num_swapped_in,
            num_relegated=self._paced.feasibility.num_demoted,
            num_discarded_tokens=self._num_discarded_tokens,
            refused=tuple(self._door.limits.refused.items()),
            waited=tuple(zip(REASONS, self._waiting.clocks.reading(), strict=True)),
            pressure_level=self.valve.level,
            predicted_step_seconds=steps.predicted_seconds,
            actual_step_seconds=steps.actual_seconds,
            num_prefill_tokens=steps.num_prefill_tokens,
            num_decode_tokens=steps.num_decode_tokens,
            num_cached_free_blocks=kv.pool.num_cached_free,
            num_host_blocks=self.cache.num_host_blocks,
            num_free_host_blocks=kv.num_free_host_blocks,
            held_by=None if self._last.held_by is None else REASONS[self._last.held_by],
        )

    def census(self) -> tuple[ClassUse, ...]:
        """Running and waiting requests by SLO class; takes too long for every step."""
        return take_census(self._running.requests, chain(self._waiting, self._forks))

    def check_integrity(self) -> None:
        """AssertionError unless every invariant of scheduler, queue, tables and pool holds."""
        forks = list(self._forks)
        running = self._running.requests
        known = [*running, *self._waiting, *forks]
        assert len(known) == len(self._requests), "a request is lost or in two places"
        assert {id(r) for r in known} == {id(r) for r in self._requests.values()}
        assert len(running) <= self.config.max_num_seqs, "too many requests run"
        self._running.check_integrity()
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
            assert fork.asked.fork_of in self._requests, "a fork waits for no request"
        self._waiting.check_integrity()
        self.kv.check_integrity(known)
