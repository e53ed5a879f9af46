"""The scheduler: events in, frozen plans out.

One call of ``schedule`` hands out at most ``max_num_batched_tokens`` tokens. There is no prefill
and no decode: every request wants ``num_computed_tokens`` to catch up with its tokens, and a
running request that is one token behind costs one token. In order:

1. Displace: if the policy says a waiting request beats running ones that stand in its way, these
   are preempted.
2. Running requests, in the policy's order. Each is sure of one token, so a long prompt cannot
   freeze the others; what is left of the budget goes to whoever is further behind. When the pool
   is empty, the policy's victim among those not yet served gives its blocks up.
3. Waiting requests, in the policy's order, if nobody was preempted. A head that does not fit may be
   passed by a bounded number of others, a bounded number of times.

Counters move when a step is planned, not when it ran, so ``schedule`` may be called again before
``update``: a request whose last token is still unknown is planned by position, and the backend uses
the token it sampled itself.

This module does not know time (``now`` is an argument), tensors, text or transport.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from paceline.core.admission import check_door
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.displacement import choose_displaced
from paceline.core.forks import Forks
from paceline.core.kv_cache import KVCacheManager
from paceline.core.lengths import LengthHistory
from paceline.core.outputs import (
    BlockCopy,
    NewRequest,
    RequestUpdate,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
    TokenLogprobs,
)
from paceline.core.policies import PolicyContext, SchedulingPolicy, make_policy
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.token_budget import (
    AdaptiveTokenBudget,
    Allowance,
    FixedTokenBudget,
    TokenBudget,
)
from paceline.core.work import WorkEstimator, label_of

__all__ = ["Scheduler"]

_ORDER = attrgetter("order")
# a NamedTuple made by tuple's constructor costs half of one made by its own; there are two of them
# for every token of every request
_new = tuple.__new__
# a best-effort request that runs gets a token in one of so many steps, however late the others are
_MAX_SKIPPED_STEPS = 8


class _Draft:
    """A plan being written."""

    def __init__(self, allowance: Allowance) -> None:
        # tokens left to hand out
        self.budget = allowance.tokens
        self.seconds = allowance.seconds
        # which rows this step takes; both where the policy mixes
        self.narrow = self.wide = True
        self.num_tokens = 0
        self.rows: list[ScheduledRow] = []
        self.requests: list[Request] = []
        self.new: list[NewRequest] = []
        self.copies: list[BlockCopy] = []
        # forks that got their blocks in this step: copies come before writes, so they may run
        # from the next step on
        self.forked: list[Request] = []

    def count(self, num_tokens: int) -> None:
        """Tokens of rows added just now."""
        self.budget -= num_tokens
        self.num_tokens += num_tokens


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
        context = PolicyContext(config, WorkEstimator(self.step_time, self.lengths))
        self.policy = policy or make_policy(context)
        self.budget: TokenBudget = FixedTokenBudget(config.max_num_batched_tokens)
        if config.adaptive_token_budget:
            self.budget = AdaptiveTokenBudget(self.step_time, config.max_num_batched_tokens)
        self._requests: dict[str, Request] = {}
        # sorted by order
        self._running: list[Request] = []
        self._waiting = self.policy.make_queue()
        self._forks = Forks()
        # requests of planned steps whose result is not in yet, step by step
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        # ids the backend still has to be told to drop
        self._released: list[str] = []
        # the policy holds all waiting requests back until then; None: it does not
        self.wake_at: float | None = None
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it at the door (``admission.check_door`` says when)."""
        check_door(request, self._requests, self.config, self.cache)
        request.order = (self.policy.key(request), self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        if request.fork_of is None:
            self._waiting.push(request)
            return
        parent = self._requests[request.fork_of]
        if parent.num_computed_tokens >= parent.num_prompt_tokens:
            self.kv.fork(parent, request)
            self._waiting.push(request)
        else:
            self._forks.add(parent, request)

    def abort(self, request_ids: Iterable[str]) -> tuple[RequestUpdate, ...]:
        """End requests now and free their blocks; unknown ids are ignored."""
        updates = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
                updates.append(_update_of(request, (), None))
        return tuple(updates)

    # ------------------------------------------------------------------ plans out

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step and move the counters as if it had run.

        An empty plan (no rows) is not to be executed and not to be passed to ``update``.
        """
        draft = _Draft(self.budget.allow(self._running, now))
        self.wake_at = self.policy.holds_until(self._waiting, len(self._running), now)
        if self.wake_at is None:
            self._displace()
        if not self.policy.mixes:
            self._choose_kind(draft)
        preempted = self._schedule_running(draft)
        if draft.wide and self.wake_at is None and (not preempted or not self._running):
            self._schedule_waiting(draft, now)
        if not draft.rows and not draft.narrow:
            # no wide row could be had after all (memory): do not waste the step
            draft.narrow = True
            self._schedule_running(draft)
        for child in draft.forked:
            self._waiting.push(child)
        if not draft.rows:
            return SchedulerOutput(self._num_steps, (), (), (), (), 0)
        plan = SchedulerOutput(
            step_id=self._num_steps,
            rows=tuple(draft.rows),
            new_requests=tuple(draft.new),
            block_copies=tuple(draft.copies),
            released=tuple(self._released),
            num_tokens=draft.num_tokens,
        )
        self._num_steps += 1
        self._released.clear()
        self._in_flight.append((plan.step_id, draft.requests))
        return plan

    def _choose_kind(self, draft: _Draft) -> None:
        """For a policy that does not mix: wide rows while there are any to compute."""
        draft.wide = any(r.num_uncomputed_tokens > 1 for r in self._running)
        if not draft.wide and self.wake_at is None:
            head = self._waiting.peek()
            draft.wide = not self._running or (
                head is not None
                and len(self._running) < self.config.max_num_seqs
                and self.kv.shortfall(head, beside_others=True) == 0
            )
        draft.narrow = not draft.wide

    def _displace(self) -> None:
        """Preempt running requests that stand in the way of a better waiting one."""
        head = self._waiting.peek()
        if head is None or head.num_pending_tokens:
            return
        chosen = choose_displaced(
            head, self._running, self.policy.displaces, self.kv, self.config.max_num_seqs
        )
        if chosen:
            # nobody else takes the room that was made for it
            head.times_bypassed = self.config.max_bypasses
        for loser in chosen:
            self._preempt(loser)

    def _schedule_running(self, draft: _Draft) -> bool:
        preempted = False
        running = self._running
        block_size = self.cache.block_size
        # a row of one token needs no thought unless its request is best-effort, wants a block, or
        # has a fork waiting for it; such rows are nearly all, so they are planned right here
        plain = self.policy.mixes and not self._forks
        rows, requests = draft.rows, draft.requests
        caching = self.cache.enable_prefix_caching
        # tokens of such rows that the draft does not count yet
        handed_out = 0
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            total = request.num_tokens + request.num_pending_tokens
            if total == computed or total >= request.max_total_tokens:
                # nothing left to compute, or only to wait for the last token
                index += 1
                continue
            end = computed + 1
            if (
                plain
                and total == end
                and not request.shares_tail
                and end <= len(request.block_ids) * block_size
                and not request.slo.best_effort
            ):
                rows.append(_new(ScheduledRow, (request.request_id, computed, 1, (), True)))
                requests.append(request)
                handed_out += 1
                request.num_computed_tokens = end
                request.num_pending_tokens += 1
                if caching and end // block_size > request.num_hashed_blocks:
                    self.kv.cache_computed(request)
                index += 1
                continue
            draft.count(handed_out)
            handed_out = 0
            if not self._takes(draft, request, total - computed):
                index += 1
                continue
            reserved = len(running) - index - 1
            num_tokens = (
                1 if total - computed == 1 else min(total - computed, draft.budget - reserved)
            )
            new_block_ids: tuple[int, ...] = ()
            if request.shares_tail or computed + num_tokens > len(request.block_ids) * block_size:
                extension = self.kv.extend(request, num_tokens)
                while extension is None:
                    preempted = True
                    if not self._drop_waiting_forks():
                        victim = self.policy.victim(running[index:])
                        self._preempt(victim)
                        if victim is request:
                            break
                    extension = self.kv.extend(request, num_tokens)
                if extension is None:
                    continue
                new_block_ids = extension.new_block_ids
                if extension.copy is not None:
                    draft.copies.append(extension.copy)
            self._plan_row(draft, request, num_tokens, new_block_ids)
            index += 1
        draft.count(handed_out)
        return preempted

    def _takes(self, draft: _Draft, request: Request, wanted: int) -> bool:
        """Whether a running request gets a row: always, but for a policy that does not mix and
        for best-effort requests that would make the step too long for the others."""
        if not self.policy.mixes:
            return draft.narrow if wanted == 1 else draft.wide
        if not request.slo.best_effort or draft.seconds == math.inf or not draft.rows:
            return True
        shape = StepShape.of(draft.rows).plus(request.num_computed_tokens, 1)
        if (
            self.step_time.predict(shape) <= draft.seconds
            or request.num_skipped_steps >= _MAX_SKIPPED_STEPS
        ):
            request.num_skipped_steps = 0
            return True
        request.num_skipped_steps += 1
        return False

    def _schedule_waiting(self, draft: _Draft, now: float) -> None:
        passed: list[Request] = []
        head: Request | None = None
        tried = 0
        while draft.budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.pop()
            if request is None:
                break
            if request.num_pending_tokens:
                # preempted while its token was being computed: ready once that is known
                passed.append(request)
                continue
            admitted = self.kv.admit(request, beside_others=bool(self._running))
            if not admitted and not self._running and self._drop_waiting_forks():
                admitted = self.kv.admit(request, beside_others=False)
            if not admitted:
                passed.append(request)
                head = head or request
                tried += 1
                if (
                    tried > self.config.bypass_window
                    or head.times_bypassed >= self.config.max_bypasses
                ):
                    break
                continue
            self._admit(draft, request, now)
            if head is not None:
                head.times_bypassed += 1
                if head.times_bypassed >= self.config.max_bypasses:
                    break
        for request in passed:
            self._waiting.push(request)

    def _admit(self, draft: _Draft, request: Request, now: float) -> None:
        num_tokens = min(request.num_tokens - request.num_computed_tokens, draft.budget)
        extension = self.kv.extend(request, num_tokens)
        assert extension is not None, "admit() promised the blocks"
        if extension.copy is not None:
            draft.copies.append(extension.copy)
        request.status = RequestStatus.RUNNING
        request.times_bypassed = 0
        self.policy.served(request, request.num_tokens - request.num_computed_tokens, 0)
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_lost_tokens = 0
        request.num_recomputed_tokens += recomputed
        self._num_recomputed_tokens += recomputed
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        insort(self._running, request, key=_ORDER)
        draft.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=(*request.prompt_token_ids, *request.output_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_ids=tuple(request.block_ids),
            )
        )
        self._plan_row(draft, request, num_tokens, ())

    def _plan_row(
        self, draft: _Draft, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]
    ) -> None:
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens + request.num_pending_tokens
        row = (request.request_id, start, num_tokens, new_block_ids, samples)
        draft.rows.append(_new(ScheduledRow, row))
        draft.requests.append(request)
        draft.count(num_tokens)
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        if end // self.cache.block_size > request.num_hashed_blocks:
            self.kv.cache_computed(request)
        if self._forks and end >= request.num_prompt_tokens:
            for child in self._forks.take(request):
                self.kv.fork(request, child)
                draft.forked.append(child)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again at its place in the order."""
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.num_lost_tokens = request.num_computed_tokens
        self._running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        self._released.append(request.request_id)
        self._waiting.push(request)

    def _drop_waiting_forks(self) -> bool:
        """Take shared prompt blocks back from waiting forks; True if any fork had some."""
        forks = [request for request in self._waiting if request.block_ids]
        for request in forks:
            self.kv.free(request)
        return bool(forks)

    # ------------------------------------------------------------------ results in

    def update(
        self, plan: SchedulerOutput, result: StepResult, now: float
    ) -> tuple[RequestUpdate, ...]:
        """Take in what a step sampled; plans are updated in the order they were made.

        Tokens of requests that ended meanwhile are dropped.
        """
        step_id, requests = self._in_flight.popleft()
        assert step_id == plan.step_id == result.step_id, "results must come in plan order"
        if result.elapsed > 0.0:
            self.step_time.observe(StepShape.of(plan.rows), result.elapsed)
        failed = dict(result.errors)
        logprobs = result.logprobs or (None,) * len(plan.rows)
        updates: list[RequestUpdate] = []
        served = self.policy.served
        append = updates.append
        ended = False
        finished = RequestStatus.FINISHED
        for request, row, token_ids, row_logprobs in zip(
            requests, plan.rows, result.sampled, logprobs, strict=True
        ):
            samples = row[4]
            if samples:
                request.num_pending_tokens -= 1
            if request.status is finished:
                continue
            if failed and row.request_id in failed:
                self._finish(request, FinishReason.ERROR, prune=False)
                updates.append(_update_of(request, (), None, failed[row.request_id]))
                ended = True
                continue
            if not samples:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            if len(token_ids) == 1:
                reason = request.append_output(token_ids[0])
            else:
                token_ids, reason = _append_all(request, token_ids)
            if reason is not None:
                if reason is FinishReason.STOP:
                    last = request.output_token_ids[-1]
                    if last not in request.sampling.eos_token_ids:
                        request.stop_reason = last
                self._finish(request, reason, prune=False)
                ended = True
            served(request, 0, len(token_ids))
            append(_update_of(request, token_ids, row_logprobs))
        if ended:
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return tuple(updates)

    def _finish(self, request: Request, reason: FinishReason, *, prune: bool = True) -> None:
        """End a request and free its blocks; ``prune`` takes it out of the running list too."""
        if request.status is RequestStatus.RUNNING:
            self._released.append(request.request_id)
            if prune:
                self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._forks.remove(request)
        for child in self._forks.take(request):
            self._waiting.push(child)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.kv.free(request, forget=reason is FinishReason.ERROR)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.lengths.observe(label_of(request), request.num_tokens - request.num_prompt_tokens)
        del self._requests[request.request_id]

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
            num_running=len(self._running),
            num_waiting=len(self._waiting) + deferred,
            num_waiting_capacity=len(self._waiting),
            num_waiting_deferred=deferred,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=self.kv.pool.num_free,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """AssertionError unless every invariant of scheduler, queue, tables and pool holds."""
        forks = list(self._forks)
        known = [*self._running, *self._waiting, *forks]
        assert len(known) == len(self._requests), "a request is lost or in two places"
        assert {id(r) for r in known} == {id(r) for r in self._requests.values()}
        assert len(self._running) <= self.config.max_num_seqs, "too many requests run"
        assert self._running == sorted(self._running, key=_ORDER), "running is out of order"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens
        for request in [*self._waiting, *forks]:
            assert request.status is RequestStatus.WAITING
            assert not request.block_ids or request.fork_of is not None, (
                "a waiting request has blocks"
            )
        for request in known:
            flying = sum(r is request for _, requests in self._in_flight for r in requests)
            assert 0 <= request.num_pending_tokens <= flying, "a pending token of no step"
            assert request.num_tokens + request.num_pending_tokens <= request.max_total_tokens
        for fork in forks:
            assert fork.fork_of in self._requests, "a fork waits for nobody"
        self._waiting.check_integrity()
        self.kv.check_integrity(known)


def _append_all(
    request: Request, token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Add tokens until one ends the output. Returns those that count, and why it ended."""
    for count, token_id in enumerate(token_ids, 1):
        reason = request.append_output(token_id)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def _update_of(
    request: Request,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    error: str | None = None,
) -> RequestUpdate:
    return _new(
        RequestUpdate,
        (
            request.request_id,
            token_ids,
            logprobs,
            request.finish_reason,
            request.stop_reason,
            request.num_cached_tokens,
            request.first_scheduled_time or 0.0,
            request.num_preemptions,
            error,
        ),
    )
