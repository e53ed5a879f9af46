"""The scheduler: events in, frozen plans out.

One call of ``schedule`` hands out at most ``max_num_batched_tokens`` tokens. There is no prefill and
no decode: every request wants ``num_computed_tokens`` to catch up with its tokens, and a running
request that is one token behind costs one token. In order:

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

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter

from paceline.core.admission import check_door
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.kv_cache import KVCacheManager
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
from paceline.core.policy import SchedulingPolicy, make_policy
from paceline.core.queue import RequestQueue
from paceline.core.request import FinishReason, Request, RequestStatus

__all__ = ["Scheduler"]

_ORDER = attrgetter("order")
# a NamedTuple made by tuple's constructor costs half of one made by its own; there are two of them
# for every token of every request
_new = tuple.__new__


class _Draft:
    """A plan being written."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[ScheduledRow] = []
        self.requests: list[Request] = []
        self.new: list[NewRequest] = []
        self.copies: list[BlockCopy] = []
        # forks that got their blocks in this step: copies come before writes, so they may run
        # from the next step on
        self.forked: list[Request] = []


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
        self.policy = policy or make_policy(config)
        self.kv = KVCacheManager(cache)
        self._requests: dict[str, Request] = {}
        # sorted by order
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        # forks that wait for their parent's prompt, by the parent's id
        self._forks: dict[str, list[Request]] = {}
        # requests of planned steps whose result is not in yet, step by step
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        # ids the backend still has to be told to drop
        self._released: list[str] = []
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it at the door (``admission.check_door`` says when and how)."""
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
            self._forks.setdefault(parent.request_id, []).append(request)

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
        draft = _Draft(self.config.max_num_batched_tokens)
        self._displace()
        preempted = self._schedule_running(draft)
        if not preempted or not self._running:
            self._schedule_waiting(draft, now)
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
            num_tokens=self.config.max_num_batched_tokens - draft.budget,
        )
        self._num_steps += 1
        self._released.clear()
        self._in_flight.append((plan.step_id, draft.requests))
        return plan

    def _displace(self) -> None:
        """Preempt running requests that stand in the way of a better waiting one.

        Nobody is preempted unless that makes room, and nobody else takes the room made.
        """
        head = self._waiting.peek()
        if head is None or head.num_pending_tokens:
            return
        losers = [r for r in self._running if self.policy.displaces(head, r)]
        if not losers or not self._in_the_way(head):
            return
        held = Counter(block_id for loser in losers for block_id in loser.block_ids)
        gain = sum(self.kv.pool.ref_count(block_id) == count for block_id, count in held.items())
        if self.kv.shortfall(head, beside_others=True) > gain:
            return
        head.times_bypassed = self.config.max_bypasses
        while losers and self._in_the_way(head):
            self._preempt(losers.pop())

    def _in_the_way(self, head: Request) -> bool:
        return (
            len(self._running) >= self.config.max_num_seqs
            or self.kv.shortfall(head, beside_others=True) > 0
        )

    def _schedule_running(self, draft: _Draft) -> bool:
        preempted = False
        running = self._running
        block_size = self.cache.block_size
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            total = request.num_tokens + request.num_pending_tokens
            if total == computed or total >= request.max_total_tokens:
                # nothing left to compute, or only to wait for the last token
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
        return preempted

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
        draft.budget -= num_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        if end // self.cache.block_size > request.num_hashed_blocks:
            self.kv.cache_computed(request)
        if self._forks and end >= request.num_prompt_tokens:
            for child in self._forks.pop(request.request_id, ()):
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
        failed = dict(result.errors)
        logprobs = result.logprobs or (None,) * len(plan.rows)
        updates: list[RequestUpdate] = []
        ended = False
        for request, row, token_ids, row_logprobs in zip(
            requests, plan.rows, result.sampled, logprobs, strict=True
        ):
            if row.samples:
                request.num_pending_tokens -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            if failed and row.request_id in failed:
                self._finish(request, FinishReason.ERROR, prune=False)
                updates.append(_update_of(request, (), None, failed[row.request_id]))
                ended = True
                continue
            if not row.samples:
                continue
            reason = None
            for count, token_id in enumerate(token_ids, 1):
                reason = request.append_output(token_id)
                if reason is not None:
                    if (
                        reason is FinishReason.STOP
                        and token_id not in request.sampling.eos_token_ids
                    ):
                        request.stop_reason = token_id
                    self._finish(request, reason, prune=False)
                    ended = True
                    token_ids = token_ids[:count]
                    break
            updates.append(_update_of(request, token_ids, row_logprobs))
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
        elif request.fork_of is not None:
            siblings = self._forks[request.fork_of]
            siblings.remove(request)
            if not siblings:
                del self._forks[request.fork_of]
        for child in self._forks.pop(request.request_id, ()):
            # the parent ended before its prompt was computed: its forks stand on their own
            self._waiting.push(child)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.kv.free(request, forget=reason is FinishReason.ERROR)
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
        deferred = sum(len(children) for children in self._forks.values())
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
        forks = [child for children in self._forks.values() for child in children]
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
        for parent_id in self._forks:
            assert parent_id in self._requests, "a fork waits for nobody"
        self._waiting.check_integrity()
        self.kv.check_integrity(known)


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
