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
4. Best-effort requests come last in both: 2 and 3 again for them, band by band, with what is left.

Counters move when a step is planned, not when it ran, so ``schedule`` may be called again before
``update``: a request whose last token is still unknown is planned by position, and the backend uses
the token it sampled itself.

This module does not know time (``now`` is an argument), tensors, text or transport.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import chain

from paceline.core.admission import Admission, Expired, check_door
from paceline.core.census import ClassUse, take_census
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.draft import Draft
from paceline.core.forecast import FirstTokenForecast
from paceline.core.forks import Forks
from paceline.core.kv_cache import KVCacheManager
from paceline.core.lengths import LengthHistory
from paceline.core.news import append_all, update_of
from paceline.core.outputs import (
    RequestUpdate,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from paceline.core.planner import Planner
from paceline.core.policies import FcfsPolicy, PolicyContext, SchedulingPolicy, make_policy
from paceline.core.pressure import Pressure, PressureValve
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.shares import TenantShares
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.survey import Survey
from paceline.core.token_budget import AdaptiveTokenBudget, FixedTokenBudget, TokenBudget
from paceline.core.waiting import WaitingRoom
from paceline.core.waits import REASONS, Reason
from paceline.core.work import WorkEstimator, label_of

__all__ = ["Scheduler"]

# a NamedTuple made by tuple's constructor costs half of one made by its own, and there is one for
# every token of every request
_new = tuple.__new__
# what holds requests up until one that runs ends
_FULL = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))
# of a step's time by its prediction: few steps take less
_EARLY = 0.1
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
        # most policies do not count what was served: not asking them saves a call for every token
        self._policy_listens = getattr(type(self.policy), "served", None) is not FcfsPolicy.served
        self.valve = PressureValve(config.pressure_threshold)
        self.forecast = FirstTokenForecast(self.step_time, work)
        self._admission = Admission(config)
        self._requests: dict[str, Request] = {}
        self._shares = TenantShares()
        self._waiting = WaitingRoom(self.policy.make_queue, self.kv, self.policy.later)
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
        # requests of planned steps whose result is not in yet, step by step, and predicted seconds
        self._in_flight: deque[tuple[int, list[Request], StepShape, float]] = deque()
        # when the last of them is predicted to end
        self._busy_until = 0.0
        # who was dropped before being started, until somebody asks
        self._expired: list[Expired] = []
        # the policy holds all waiting requests back until then; None: it does not
        self.wake_at: float | None = None
        # what held the head of the queue up in the last step, and its prompt tokens
        self._held_by: Reason | None = None
        self._chunk = config.max_num_batched_tokens
        # prompt tokens running requests lacked when the forecast last looked, and at which step
        self._tokens_running = 0
        self._looked_at = -1
        self._num_added = 0
        self._num_steps = 0
        self._num_discarded_tokens = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._predicted_seconds = 0.0
        self._actual_seconds = 0.0

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it at the door.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_door``.
            QueueFullError: it cannot be served soon, see ``Admission.check``.
        """
        check_door(request, self._requests, self.config, self.cache)
        request.favoured = self.policy.keeps_tenants_apart and self._shares.is_light(request.tenant)
        if request.fork_of is None:
            request.predicted_ttft = self._predict_ttft(request)
            request.forecast_bias = self.forecast.bias
            waiting = len(self._waiting) + len(self._forks)
            own = 0
            if (
                self.policy.keeps_tenants_apart
                and self._admission.is_crowded(waiting)
                and self._shares.has_others(request.tenant)
            ):
                own = self._num_waiting_of(request.tenant)
            self._admission.check(waiting, request.predicted_ttft, self.valve.level, own)
            self._admission.limit(request, self._num_added)
            self.kv.hash_prompt(request)
        request.order = (self.policy.key(request), self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._shares.came(request.tenant)
        if request.fork_of is None:
            self._waiting.enter(request, request.arrival_time)
            return
        parent = self._requests[request.fork_of]
        if (
            parent.status is RequestStatus.RUNNING
            and parent.num_computed_tokens >= parent.num_prompt_tokens
        ):
            self.kv.fork(parent, request)
            self._waiting.enter(request, request.arrival_time)
        else:
            self._forks.add(parent, request)

    def _num_waiting_of(self, tenant: str) -> int:
        running = sum([r.tenant == tenant for r in self._planner.running])
        return self._shares.unfinished(tenant) - running

    def abort(self, request_ids: Iterable[str]) -> tuple[RequestUpdate, ...]:
        """End requests now and free their blocks; unknown ids are ignored."""
        updates = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
                updates.append(update_of(request, (), None))
        return tuple(updates)

    def take_expired(self) -> tuple[Expired, ...]:
        """Requests that ``schedule`` dropped before they were started, once each."""
        expired = tuple(self._expired)
        self._expired.clear()
        return expired

    def _predict_ttft(self, request: Request) -> float | None:
        """Seconds to the first token if it were queued now; None while nothing is known."""
        if not self.step_time.ready:
            return None
        if self._looked_at != self._num_steps:
            self._looked_at = self._num_steps
            full = bool(len(self._waiting)) and self._held_by in _FULL
            running = self._planner.running
            free = 0 if full else self.config.max_num_seqs - len(running)
            self.forecast.look(running, free_places=free, tokens_per_step=self._chunk)
            self._tokens_running = sum(
                max(0, r.num_uncomputed_tokens - 1) for r in running if not r.slo.best_effort
            )
        requests_ahead, tokens_ahead = self._waiting.ahead_of(request)
        return self.forecast.seconds(
            request.num_prompt_tokens,
            tokens_ahead=self._tokens_running + tokens_ahead,
            requests_ahead=requests_ahead,
        )

    def _drop_expired(self, now: float) -> None:
        for request in self._admission.expired(now):
            if (
                request.first_scheduled_time is None
                and self._requests.get(request.request_id) is request
                and request.status is RequestStatus.WAITING
            ):
                for fork in self._forks.of(request):
                    self._finish(fork, FinishReason.ABORT)
                predicted = self._predict_ttft(request)
                self._expired.append(self._admission.expiry(request, now, predicted))
                self._finish(request, FinishReason.ABORT)

    # ------------------------------------------------------------------ plans out

    @property
    def plan_at(self) -> float:
        """When the next step is best planned while one runs: as late as can be, so that whoever
        arrives until then is in it, and yet before the one that runs has ended. Minus infinity:
        at once."""
        if not self._in_flight or not self.step_time.ready:
            return -math.inf
        seconds = self._in_flight[-1][3]
        # most steps take at least so much of what was predicted
        surely = min(1.0, self.step_time.quantile(_EARLY))
        return self._busy_until - (1.0 - surely) * seconds - self.config.plan_lead_s

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step and move the counters as if it had run.

        An empty plan (no rows) is not to be executed and not to be passed to ``update``.
        """
        running = self._planner.running
        self._drop_expired(now)
        pressure = self.valve.update(1.0 - self.kv.pool.num_free / self.cache.num_blocks)
        # steps run one after another, so this one starts when those planned before it have ended
        starts = max(now, self._busy_until) if self._in_flight else now
        survey = Survey.of(running)
        lateness = self._planner.lateness
        moved = lateness.relegate_running(running, survey.wide, starts)
        if lateness.keep_deadlines(running, survey, starts) or moved:
            survey = Survey.of(running)
        if self.policy.keeps_tenants_apart:
            head = self._waiting.ordinary.peek()
            survey.favour(self._planner.favourable_tokens(head))
            survey.shared = self._shares.are_several
        allowance = self.budget.allow(survey, starts)
        self._chunk = allowance.tokens - len(running)
        draft = Draft(allowance)
        if pressure >= Pressure.SMALL_CHUNKS:
            draft.budget = min(draft.budget, len(running) + max(_MIN_CHUNK, self._chunk // 4))
        self.wake_at = self.policy.holds_until(self._waiting.ordinary, len(running), now)
        held_by = self._planner.fill(
            draft, survey, now, starts=starts, held=self.wake_at is not None, pressure=pressure
        )
        self._held_by = held_by if len(self._waiting) else None
        self._waiting.clocks.note(self._held_by, now)
        if not draft.rows:
            return SchedulerOutput(self._num_steps, (), (), (), (), 0)
        if self._held_by is Reason.SLOTS or self._held_by is Reason.BUDGET:
            self._waiting.prefetch()
        plan = SchedulerOutput(
            self._num_steps,
            tuple(draft.rows),
            tuple(draft.new),
            tuple(draft.copies),
            tuple(self._planner.released),
            draft.num_tokens,
            *self.kv.take_swaps(),
        )
        self._num_steps += 1
        self._planner.released.clear()
        shape = draft.shape
        seconds = self.step_time.predict(shape)
        self._in_flight.append((plan.step_id, draft.requests, shape, seconds))
        self._busy_until = starts + seconds
        return plan

    # ------------------------------------------------------------------ results in

    def update(
        self, plan: SchedulerOutput, result: StepResult, now: float, *, tell_all: bool = True
    ) -> tuple[RequestUpdate, ...]:
        """Take in what a step sampled; plans are updated in the order they were made.

        Tokens of requests that ended meanwhile are dropped. ``tell_all=False`` returns the news of
        requests that ended alone: a simulator has nobody to stream tokens to.
        """
        self._looked_at = -1
        step_id, requests, shape, _ = self._in_flight.popleft()
        assert step_id == plan.step_id == result.step_id, "results must come in plan order"
        self._num_prefill_tokens += shape.wide_tokens
        self._num_decode_tokens += shape.narrow_rows
        # the next one has just begun
        self._busy_until = now + sum([step[3] for step in self._in_flight])
        if result.elapsed > 0.0:
            ready = self.step_time.ready
            predicted = self.step_time.observe(shape, result.elapsed)
            if ready:
                self._predicted_seconds += predicted
                self._actual_seconds += result.elapsed
        failed = dict(result.errors)
        logprobs = result.logprobs or (None,) * len(plan.rows)
        updates: list[RequestUpdate] = []
        served = self.policy.served
        listens = self._policy_listens
        ended = False
        # looked up once: this loop turns once for every token
        finished, samples_at = RequestStatus.FINISHED, ScheduledRow._fields.index("samples")
        append = updates.append
        for request, row, token_ids, row_logprobs in zip(
            requests, plan.rows, result.sampled, logprobs, strict=True
        ):
            samples = row[samples_at]
            if samples:
                request.num_pending_tokens -= 1
            if request.status is finished:
                continue
            if failed and row.request_id in failed:
                self._finish(request, FinishReason.ERROR, prune=False)
                updates.append(update_of(request, (), None, failed[row.request_id]))
                ended = True
                continue
            if not samples:
                continue
            total = request.num_tokens + 1
            if (
                len(token_ids) == 1
                and total < request.max_total_tokens
                and token_ids[0] not in request.stop_ids
                and request.first_token_time is not None
            ):
                # nearly all, by the shortest way: the other branch would do the same
                request.output_token_ids.append(token_ids[0])
                request.num_tokens = total
            else:
                if request.first_token_time is None:
                    request.first_token_time = now
                    self._learn_ttft(request, now)
                token_ids, reason = append_all(request, token_ids)
                if reason is not None:
                    last = request.output_token_ids[-1]
                    if reason is FinishReason.STOP and last not in request.sampling.eos_token_ids:
                        request.stop_reason = last
                    self._finish(request, reason, prune=False)
                    ended = True
                    served(request, 0, len(token_ids))
                    append(update_of(request, token_ids, row_logprobs))
                    continue
            if listens:
                served(request, 0, len(token_ids))
            if not tell_all:
                continue
            # what update_of would make, without the call
            news = (
                request.request_id,
                token_ids,
                row_logprobs,
                None,
                None,
                request.num_cached_tokens,
                request.first_scheduled_time,
                request.num_preemptions,
                None,
                None,
            )
            append(_new(RequestUpdate, news))
        if ended:
            self._planner.running[:] = [
                r for r in self._planner.running if r.status is RequestStatus.RUNNING
            ]
        return tuple(updates)

    def _learn_ttft(self, request: Request, now: float) -> None:
        """Take in what became of a forecast, where it was of what then happened."""
        if (
            request.predicted_ttft is not None
            and not request.slo.best_effort
            and not request.num_preemptions
        ):
            self.forecast.learn(
                request.predicted_ttft / request.forecast_bias, now - request.arrival_time
            )

    def _finish(self, request: Request, reason: FinishReason, *, prune: bool = True) -> None:
        """End a request and free its blocks; ``prune`` takes it out of the running list too."""
        self._looked_at = -1
        if request.status is RequestStatus.RUNNING:
            self._planner.released.append(request.request_id)
            if prune:
                self._planner.running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._forks.remove(request)
        for child in self._forks.take(request):
            self._waiting.enter(child, child.arrival_time)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if reason is FinishReason.ERROR or reason is FinishReason.ABORT:
            self._num_discarded_tokens += request.num_computed_tokens
        self.kv.end(request, forget=reason is FinishReason.ERROR)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.lengths.observe(label_of(request), request.num_tokens - request.num_prompt_tokens)
        del self._requests[request.request_id]
        self._shares.went(request.tenant)

    # ------------------------------------------------------------------ views

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result is not in."""
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        deferred = len(self._forks)
        return SchedulerStats(
            num_running=len(self._planner.running),
            num_waiting=len(self._waiting) + deferred,
            num_waiting_capacity=len(self._waiting),
            num_waiting_deferred=deferred,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=self.kv.pool.num_free,
            num_preemptions=self._planner.num_preemptions,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            num_recomputed_tokens=self._planner.num_recomputed_tokens,
            num_swapped_out_blocks=self.kv.num_swapped_out,
            num_swapped_in_blocks=self.kv.num_swapped_in,
            num_relegated=self._planner.lateness.num_relegated,
            num_discarded_tokens=self._num_discarded_tokens,
            refused=tuple(self._admission.refused.items()),
            waited=tuple(zip(REASONS, self._waiting.clocks.reading(), strict=True)),
            pressure_level=self.valve.level,
            predicted_step_seconds=self._predicted_seconds,
            actual_step_seconds=self._actual_seconds,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_cached_free_blocks=self.kv.pool.num_cached_free,
            num_host_blocks=self.cache.num_host_blocks,
            num_free_host_blocks=self.kv.num_free_host_blocks,
            held_by=None if self._held_by is None else REASONS[self._held_by],
        )

    def census(self) -> tuple[ClassUse, ...]:
        """Who runs and waits now, by SLO class; takes too long for every step."""
        return take_census(self._planner.running, chain(self._waiting, self._forks))

    def check_integrity(self) -> None:
        """AssertionError unless every invariant of scheduler, queue, tables and pool holds."""
        forks = list(self._forks)
        running = self._planner.running
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
            assert not request.block_ids or request.fork_of or request.num_swapped_tokens
        for request in known:
            flying = sum(r is request for step in self._in_flight for r in step[1])
            assert 0 <= request.num_pending_tokens <= flying, "a pending token of no step"
            assert request.num_tokens + request.num_pending_tokens <= request.max_total_tokens
        for fork in forks:
            assert fork.fork_of in self._requests, "a fork waits for nobody"
        self._waiting.check_integrity()
        self.kv.check_integrity(known)
