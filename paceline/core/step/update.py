"""What a step sampled: appended to its requests, and told to whoever asked.

This module does not know how the step was chosen.
"""

from __future__ import annotations

from typing import Protocol

from paceline.core.outputs import RequestUpdate, ScheduledRow, SchedulerOutput, StepResult
from paceline.core.pacing.first_token import Prospects
from paceline.core.policies import FcfsPolicy, SchedulingPolicy
from paceline.core.queues.running import Running
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.step.news import append_all, update_of

__all__ = ["Results"]

# see news.py
_new = tuple.__new__
_SAMPLES = ScheduledRow._fields.index("samples")


class _Finish(Protocol):
    def __call__(self, request: Request, reason: FinishReason, *, prune: bool) -> None: ...


class Results:
    """Owned by the scheduler.

    Args:
        prospects: told when first tokens come.
        finish: ends a request; without ``prune`` it stays among those that run for now.
    """

    def __init__(
        self, policy: SchedulingPolicy, running: Running, prospects: Prospects, finish: _Finish
    ) -> None:
        self._running = running
        self._prospects = prospects
        self._finish = finish
        self._sampled = policy.sampled
        # most policies do not count what was served
        self._listens = any(
            getattr(type(policy), name, None) is not getattr(FcfsPolicy, name)
            for name in ("served", "sampled")
        )

    def take_in(
        self,
        plan: SchedulerOutput,
        requests: list[Request],
        result: StepResult,
        now: float,
        *,
        tell_all: bool,
    ) -> tuple[RequestUpdate, ...]:
        """See ``Scheduler.update``; ``requests`` are those of the plan's rows."""
        failed = dict(result.errors)
        logprobs = result.logprobs or (None,) * len(plan.rows)
        updates: list[RequestUpdate] = []
        listens = self._listens
        # the requests of all new tokens, for the policy to count
        spent: list[Request] = []
        ended = False
        # looked up once: this loop turns once for every token
        finished, samples_at = RequestStatus.FINISHED, _SAMPLES
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
                and request.history.told
            ):
                # nearly all, by the shortest way: the other branch would do the same
                request.output_token_ids.append(token_ids[0])
                request.num_tokens = total
                if listens:
                    spent.append(request)
            else:
                if request.first_token_time is None:
                    request.first_token_time = now
                    self._prospects.learn(request, now)
                token_ids, reason = append_all(request, token_ids)
                spent += [request] * len(token_ids)
                if reason is not None:
                    last = request.output_token_ids[-1]
                    if (
                        reason is FinishReason.STOP
                        and last not in request.asked.sampling.eos_token_ids
                    ):
                        request.stop_reason = last
                    self._finish(request, reason, prune=False)
                    ended = True
                    append(update_of(request, token_ids, row_logprobs))
                    continue
                if not request.history.told:
                    request.history.told = True
                    if tell_all:
                        append(update_of(request, token_ids, row_logprobs, tells=True))
                    continue
            if not tell_all:
                continue
            # what update_of would make, without the call
            news = (
                request.request_id,
                token_ids,
                row_logprobs,
                None,
                None,
                request.history.num_cached_tokens,
                request.first_scheduled_time,
                request.num_preemptions,
                None,
                None,
            )
            append(_new(RequestUpdate, news))
        if listens and spent:
            self._sampled(spent)
        if ended:
            self._running.prune()
        return tuple(updates)
