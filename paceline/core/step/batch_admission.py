"""Admission of waiting requests to the batch.

Requests are admitted in the policy's order until something runs out: slots, memory now or as
predicted, the pace of running requests, tokens of the step. A bounded number of others may pass a
head that does not fit.

This module does not know the tokens of running requests, or which of them are preempted.
"""

from __future__ import annotations

from paceline.core.memory.outlook import MemoryOutlook, capacity
from paceline.core.outputs import NewRequest
from paceline.core.policies import overrides
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.rows import Rows
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["BatchAdmission"]


class BatchAdmission:
    """Admits waiting requests into steps."""

    def __init__(self, state: SchedulerState, rows: Rows) -> None:
        self._state, self._rows, self._config = state, rows, state.config
        self._kv, self._waiting, self._running = state.kv, state.waiting, state.running
        self._charges = overrides(state.policy, "served")
        self._capacity = capacity(state.cache)

    def admit_waiting(self, step: Step, last: Tier) -> Reason | None:
        """Admit requests up to tier ``last`` until something runs out, and return what."""
        window, most, tried = self._config.max_skip_ahead, self._config.max_skips, 0
        passed: list[Request] = []
        head: Request | None = None
        outlook: MemoryOutlook | None = None
        blocked_by: Reason | None = None
        while isinstance(request := step.next(last, passed), Request):
            self._waiting.take(request)
            if request.num_pending_tokens:
                # preempted while its token was computed: it is ready once that token is known
                passed.append(request)
                continue
            if step.demotes(request, passed):
                self._waiting.push(request)
                continue
            if outlook is None and not self._surely_lasts(request, last):
                outlook = self._state.outlook(last, self._running.requests)
            obstacle = self._obstacle(step, request, outlook)
            if obstacle is None:
                self._admit(step, request)
                if head is None:
                    continue
                head.times_skipped += 1
            else:
                passed.append(request)
                if step.stands_aside(request, last):
                    # it may go before earlier tiers, but does not hold them up
                    continue
                blocked_by, head, tried = blocked_by or obstacle, head or request, tried + 1
            if tried > window or head.times_skipped >= most:
                break
        else:
            blocked_by = blocked_by or request
        for each in passed:
            self._waiting.push(each)
        return blocked_by

    def _surely_lasts(self, request: Request, last: Tier) -> bool:
        """Whether memory need not last, or lasts even if every output reaches its maximum."""
        if not self._config.future_memory_check or not self._running.requests:
            return True
        most = request.max_total_tokens + self._kv.block_size
        counted = self._running.most_tokens[: last + 1 if last is Tier.ORDINARY else None]
        return sum(counted) + most <= self._capacity

    def _obstacle(
        self, step: Step, request: Request, outlook: MemoryOutlook | None
    ) -> Reason | None:
        """Return the reason that keeps a waiting request out; None: it has its blocks now."""
        kv = self._kv
        if not self._running.requests:
            while not kv.admit(request, beside_others=False):
                if not self._waiting.drop_blocks():
                    return Reason.MEMORY
            return None
        is_whole = not self._config.enable_chunked_prefill
        if is_whole and step.rows and request.num_tokens > step.budget:
            return Reason.BUDGET
        if (obstacle := step.obstacle(request)) is not None:
            return obstacle
        most = self._config.max_adapters
        if most and request.asked.adapter and not self._has_adapter_slot(request, most):
            return Reason.SLOTS
        if outlook is None:
            return None if kv.admit(request, beside_others=True) else Reason.MEMORY
        num_shared = kv.num_in_use(request)
        if not outlook.admits(request, num_shared) or not kv.admit(request, beside_others=True):
            return Reason.MEMORY
        outlook.add(request, num_shared)
        return None

    def _has_adapter_slot(self, request: Request, most: int) -> bool:
        """Whether at most ``most`` adapters run with this request's."""
        running = {r.asked.adapter.slot for r in self._running.requests if r.asked.adapter}
        assert request.asked.adapter is not None
        return len(running | {request.asked.adapter.slot}) <= most

    def _admit(self, step: Step, request: Request) -> None:
        num_tokens = uncached = request.num_tokens - request.num_computed_tokens
        if self._config.enable_chunked_prefill:
            num_tokens = min(num_tokens, step.budget)
            if request.tier is not Tier.ORDINARY:
                num_tokens = min(num_tokens, step.chunk(request, admission=True))
        extension = self._kv.extend(request, num_tokens)
        assert extension is not None and not extension.new_block_ids, "admit() gave the blocks"
        if self._charges and not request.num_preemptions and request.asked.resumed is None:
            # preemptions and lost engines repeat work, but tokens are charged once
            self._state.policy.served(request, uncached, 0)
        history = request.history
        recomputed = max(0, history.num_lost_tokens - request.num_computed_tokens)
        history.num_lost_tokens = 0
        history.num_recomputed_tokens += recomputed
        self._state.totals.num_recomputed_tokens += recomputed
        request.times_skipped = 0
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
            history.num_found_tokens = request.num_computed_tokens
        self._waiting.leave(request, step.now)
        self._running.start(request)
        slot, scale = (
            (adapter.slot, adapter.scale) if (adapter := request.asked.adapter) else (-1, 1.0)
        )
        new = NewRequest(
            adapter=slot, adapter_scale=scale,
            request_id=request.request_id, num_prompt_tokens=request.num_prompt_tokens,
            token_ids=(*request.asked.prompt_token_ids, *request.output_token_ids),
            sampling=request.asked.sampling, block_ids=tuple(request.block_ids),
        )  # fmt: skip
        step.new.append(new)
        step.admitted(request)
        before = step.shape
        self._rows.add(step, request, num_tokens, extension)
        if request.tier is not Tier.ORDINARY:
            step.lengthened(before)
