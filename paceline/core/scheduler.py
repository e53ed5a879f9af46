"""The scheduler: events in, frozen plans out.

One call of ``schedule`` hands out at most ``max_num_batched_tokens`` tokens, with which requests
catch up: there is no prefill and no decode (``request``). In order:

1. *Limits* (``step.limits``) of the step. Without targets that is a number of tokens; with targets,
``pacing`` settles which requests go first, and how long the step may take.
2. *Rows* (``step.rows``) for running requests, in the policy's order. Each is sure of one token, so
   a long prompt cannot freeze the others; what is left of the tokens goes to requests that are
   further behind. When the pool is empty, one of those not yet served gives its blocks up.
3. *Admission* (``step.batch_admission``) of waiting requests, in the policy's order, if none was
   preempted. A head that does not fit may be passed by a bounded number of others, a bounded number
   of times.
4. Best-effort requests come last in both: 2 and 3 again for them, tier by tier, with what is left.

Counters move when a step is planned, not when it ran, so ``schedule`` may be called again before
``update``: a request whose last token is unknown is planned by position; the backend knows it.

This module does not know time (``now`` is an argument), tensors, text or transport.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.interface import KVCache
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote, StepResult
from paceline.core.pacing.paced import Paced
from paceline.core.pacing.request_admission import Expired, RequestAdmission
from paceline.core.pacing.tenants import TenantShares
from paceline.core.policies import FcfsPolicy
from paceline.core.predict.step_time import NO_ADAPTERS
from paceline.core.queues.fair_queue import TenantWeights, adapter_of
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.stats import SchedulerStats
from paceline.core.step.amend import amend
from paceline.core.step.limits import Pacing, Plain
from paceline.core.step.planner import Planner
from paceline.core.step.speculation import Speculation, SpeculationMaker, make_speculation
from paceline.core.step.state import SchedulerState, check_integrity, take_stats
from paceline.core.step.update import Updates, update_of
from paceline.errors import QueueFullError

__all__ = ["Scheduler"]


class Scheduler:
    """Decides every step. Single-threaded; every call is deterministic in its arguments.

    Args:
        policy: overrides ``config.policy``.
        speculation: makes the source of draft tokens (``paceline.speculation``); None: no drafts.
        kv: the cache to plan over, of ``cache``'s sizes; None: block tables of our own.

    Raises:
        ConfigError: see ``make_speculation``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        policy: FcfsPolicy | None = None,
        *,
        speculation: SpeculationMaker | None = None,
        kv: KVCache | None = None,
    ) -> None:
        self.config, self.cache = config, cache
        self.state = state = SchedulerState(config, cache, policy, kv)
        self.policy, self.kv, self.valve = state.policy, state.kv, state.valve
        self.step_time, self.lengths = state.step_time, state.lengths
        self._waiting, self._forks, self._running = state.waiting, state.forks, state.running
        self._steps, self._last = state.steps, state.last
        # tenants are counted only if the policy tells them apart
        weights = TenantWeights(config.tenant_weights)
        self._tenants = TenantShares(weights) if self.policy.keeps_tenants_apart else None
        self._planner = Planner(state)
        self._plain = Plain(state)
        self._paced = paced = Paced(state, self._tenants)
        self._admission = RequestAdmission(state, self._tenants, paced.share, paced.waiting_targets)
        self._pacing: Pacing = self._plain
        self._updates = Updates(state, self._finish)
        # the given source, and the one in use: while there are no drafts, no step calls it
        self._given_speculation = make_speculation(state, speculation)
        self._speculation: Speculation | None = None
        self._begin_drafts(None)
        self._requests: dict[str, Request] = {}
        self._expired: list[Expired] = []
        # time until which the policy holds all waiting requests back; None: it does not
        self.wake_at: float | None = None
        # conditions of the newest plan with rows
        self.note: StepNote | None = None
        self._num_added = self._num_steps = 0
        # requests with an adapter that have not ended, and the work of the last step's adapters
        self._num_adapted, self._adapters = 0, NO_ADAPTERS
        self._rest()

    # ------------------------------------------------------------------ events in

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_admissible``.
            QueueFullError: it cannot be served soon, see ``RequestAdmission.check``.
        """
        self._admission.check(request, self._requests)
        request.order = (request.key, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._num_adapted += request.asked.adapter is not None
        if self._tenants is not None:
            self._tenants.on_arrival(request.asked.tenant, adapter_of(request))
        if request.targets.has_targets or request.best_effort:
            self._pacing = self._paced
        if self._speculation is None and request.asked.prediction_token_ids:
            self._begin_drafts(request)
        if request.asked.fork_of is None:
            if request.asked.resumed is None:
                self._admission.watch(request)
            self._waiting.arrive(request)
            return
        parent = self._requests[request.asked.fork_of]
        if parent.num_computed_tokens >= parent.num_prompt_tokens:
            # the parent runs: requests that wait have computed less
            self.kv.fork(parent, request)
            self._waiting.arrive(request)
        else:
            self._forks.add(parent, request)

    def foresee(self, request: Request, *, counts: bool = False) -> QueueFullError | None:
        """Return why a request, which an empty engine could serve, is refused if it arrives now;
        None if it would be queued, which it is not. Its history has the predicted time to first
        token then. ``counts``: its caller is told, and counts as refused and as coming back."""
        return self._admission.foresee(request, counts=counts)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> tuple[RequestUpdate, ...]:
        """End requests now and free their blocks; unknown ids are ignored. ``reason`` is STOP if a
        stop string was found, so that the answer is complete."""
        ended = [r for r in map(self._requests.get, dict.fromkeys(request_ids)) if r is not None]
        for request in ended:
            self._finish(request, reason)
        self._running.prune()
        return tuple(update_of(request, (), None) for request in ended)

    def take_expired(self) -> tuple[Expired, ...]:
        """Return the requests that ``schedule`` dropped before they were started, once each."""
        expired, self._expired = tuple(self._expired), []
        return expired

    # ------------------------------------------------------------------ plans out

    def share(self, away_s: float, longest_s: float) -> None:
        """Plan from now on for processors that other engines use too.

        Args:
            away_s: seconds that they take between two steps; 0: none.
            longest_s: predicted seconds of the longest step that leaves them their pace; chunks of
                prompts are made no larger.
        """
        self.state.chunk.away_s, self.state.chunk.longest_s = away_s, longest_s

    @property
    def tightest_tpot(self) -> float:
        """Return the least TPOT target of running requests; infinite: none has one."""
        tpots = (request.targets.tpot for request in self._running.requests)
        return min((tpot for tpot in tpots if tpot is not None), default=math.inf)

    @property
    def plan_at(self) -> float:
        """Best time to plan the next step while one runs: shortly before that one ends, so that
        requests which arrive until then are in it. Minus infinity: at once."""
        return self._steps.plan_at

    @property
    def awaits_tokens(self) -> bool:
        """Whether to plan the next step only once all tokens are known: drafts can follow then."""
        return self._speculation is not None and self._speculation.awaits_tokens

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step and move the counters as if it had run. A plan without rows is not to
        be executed and not to be passed to ``update``."""
        running = self._running.requests
        self._waiting.begin_plan(now)
        if now >= self._admission.next_expiry or self._last.demoted:
            self._expired += self._admission.drop(now, self._finish)
        if self.valve.threshold < 1.0:
            self.valve.update(1.0 - self.kv.pool.num_free / self.cache.num_blocks)
        if self._num_adapted:
            self.step_time.expect_adapters(self._adapters)
        starts = self._steps.starts(now) + self.state.chunk.away_s
        self.wake_at = self.policy.holds_until(self._waiting.ordinary, len(running), now)
        held = self.wake_at is not None
        step = self._pacing.begin(now, starts, held=held)
        budget = step.budget
        blocked_by = self._planner.fill(step, held=held)
        blocked_by = blocked_by if len(self._waiting) else None
        self._waiting.clocks.note(blocked_by, now)
        self._last.blocked_by, self._last.chunk_tokens = blocked_by, step.chunk_tokens
        if not step.rows:
            self._steps.note_ordinary(starts, 0.0)
            return SchedulerOutput(self._num_steps, (), (), (), (), 0)
        drafts = self._speculation.add(step) if self._speculation is not None else ()
        plan = SchedulerOutput(
            self._num_steps, tuple(step.rows), tuple(step.new), tuple(step.copies),
            self._running.take_released(), step.wide_tokens + step.narrow_rows,
            self.kv.host.take_swaps() if self.kv.host.swaps else (), drafts,
            () if self._speculation is None else self._speculation.forces(step),
            () if self.kv.windows is None else self.kv.windows.end_plan(),
        )  # fmt: skip
        self._num_steps += 1
        shape, alone = step.shape, step.ordinary_seconds
        if self._num_adapted:
            self._adapters = step.adapter_work()
            self.step_time.expect_adapters(self._adapters)
        making = self._speculation.making_seconds if self._speculation is not None else 0.0
        seconds = self.step_time.predict(shape) + making
        self._steps.push(
            plan.step_id, step.requests, shape, starts, seconds, alone, making, self._adapters
        )  # fmt: skip
        self._last.version += 1
        waiting = len(self._waiting) + (len(self._forks) if self._forks.by_parent else 0)
        self.note = StepNote(
            budget=budget, limit_s=step.seconds, predicted_s=seconds, blocked_by=blocked_by,
            pressure=self.valve.level, num_free_blocks=self.kv.pool.num_free, num_waiting=waiting,
        )  # fmt: skip
        return plan

    def amend(
        self,
        plan: SchedulerOutput,
        done: Mapping[str, range],
        preempted: Collection[str],
        now: float,
    ) -> SchedulerOutput:
        """Put right what was planned and did not run, and return the plan as it ran: for backends
        that may decline a part, as one does that owns the memory. It is called after ``schedule``,
        before the next plan. One without rows is not to be passed to ``update``.

        Args:
            done: the positions that ran of each row that came out otherwise; it may be empty.
            preempted: ids of requests that the backend preempted by itself: they wait, without
                blocks, and none of their tokens is computed.
        """
        self._last.version += 1
        gone = [self._requests[each] for each in preempted]
        return amend(self.state, plan, done, gone, now)

    # ------------------------------------------------------------------ results in

    def update(
        self, plan: SchedulerOutput, result: StepResult, now: float, *, tell_all: bool = True
    ) -> tuple[RequestUpdate, ...]:
        """Apply a step's result, in the order of plans; tokens of requests that ended meanwhile
        are dropped. ``tell_all=False``: return the updates of ended requests alone."""
        self._last.version += 1
        requests = self._steps.pop(plan, result, now)
        if self._speculation is not None:
            self._speculation.apply_result(plan, requests, result, now)
        updates = self._updates.apply_result(plan, requests, result, now, tell_all=tell_all)
        self._running.prune()
        return updates

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its blocks; the running list keeps it until that is pruned."""
        self._last.version += 1
        if request.status is RequestStatus.RUNNING:
            self._running.stop(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._forks.remove(request)
        for child in self._forks.take(request):
            # the fork goes on as a request of its own: nothing of it was started
            self._waiting.arrive(child)
            self._admission.watch(child)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.lengths.observe(request.label, request.num_output_tokens)
        elif request.first_scheduled_time is not None:
            history, computed = request.history, request.num_computed_tokens
            wasted = max(0, max(computed, history.num_lost_tokens) - history.num_found_tokens)
            self.state.totals.num_discarded_tokens += wasted
        self.kv.free(request, forget=reason is FinishReason.ERROR)
        self.kv.host.forget(request)
        del self._requests[request.request_id]
        if request.asked.adapter is not None:
            self._num_adapted -= 1
            if not self._num_adapted:
                self._adapters = NO_ADAPTERS
                self.step_time.expect_adapters(NO_ADAPTERS)
        if self._tenants is not None:
            self._tenants.on_finish(request.asked.tenant, adapter_of(request))
        if not self._requests:
            self._rest()

    def _rest(self) -> None:
        """Reset what the last plan measured: the last request has ended."""
        self.valve.update(0.0)
        self._waiting.rest()
        self._paced.rest()
        self._admission.rest()
        self._last.blocked_by = None
        # requests without targets need no pacing where tenants are not kept apart
        self._pacing = self._plain if self._tenants is None else self._paced

    def _begin_drafts(self, request: Request | None) -> None:
        if self._given_speculation is not None and self._given_speculation.begins(request):
            self._speculation = self._given_speculation

    # ------------------------------------------------------------------ views

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> Collection[Request]:
        """All requests that have not ended, read-only."""
        return self._requests.values()

    def stats(self) -> SchedulerStats:
        """Return a snapshot, cheap enough to take every step."""
        return take_stats(self.state)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all invariants of scheduler, queue, tables and pool hold."""
        check_integrity(self.state, self._requests)
        self._paced.waiting_targets.check_integrity()
