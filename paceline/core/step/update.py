"""Sampled tokens: appended to their requests, and sent to the callers.

This module does not know how the step was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.core.outputs import (
    RequestUpdate,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    Timeline,
    TokenLogprobs,
)
from paceline.core.policies import overrides
from paceline.core.queues.wait_clocks import REASONS
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.step.state import SchedulerState

__all__ = ["Updates", "update_of"]

# calling tuple's constructor for a NamedTuple takes half the time of calling its own
_new = tuple.__new__
_SAMPLES = ScheduledRow._fields.index("samples")

# one row's; None if the request wants none
_Logprobs = tuple[TokenLogprobs, ...] | None


class Updates:
    """Applies results to requests; ``finish`` ends one, which stays in the running list for now."""

    def __init__(
        self, state: SchedulerState, finish: Callable[[Request, FinishReason], None]
    ) -> None:
        self._state, self._finish = state, finish
        self._sampled = state.policy.sampled
        # most policies do not count tokens served
        self._counts = overrides(state.policy, "served", "sampled")

    def apply_result(
        self,
        plan: SchedulerOutput,
        requests: list[Request],
        result: StepResult,
        now: float,
        *,
        tell_all: bool,
    ) -> tuple[RequestUpdate, ...]:
        """Apply a result, see ``Scheduler.update``; ``requests`` are those of the plan's rows."""
        failed = dict(result.errors)
        logprobs = result.logprobs or (None,) * len(plan.rows)
        updates: list[RequestUpdate] = []
        # the requests of all new tokens, for the policy to count
        counted: list[Request] = []
        finished, samples_at = RequestStatus.FINISHED, _SAMPLES
        counts, append = self._counts, updates.append
        # this loop runs once for every token
        for request, row, token_ids, row_logprobs in zip(
            requests, plan.rows, result.sampled, logprobs, strict=True
        ):
            if row[samples_at]:
                request.num_pending_tokens -= 1
            if request.status is finished:
                continue
            total = request.num_tokens + 1
            if (
                len(token_ids) == 1
                and total < request.max_total_tokens
                and token_ids[0] not in request.stop_ids
                and request.timeline_sent
                and not failed
            ):
                # the short way for nearly all rows; the code below would do the same
                request.output_token_ids.append(token_ids[0])
                request.num_tokens = total
                if counts:
                    counted.append(request)
                if tell_all:
                    # the same as ``update_of``, without the call
                    news = (
                        row[0], token_ids, row_logprobs, None, None, request.num_cached_tokens,
                        request.first_scheduled_time, request.num_preemptions, None, None,
                    )  # fmt: skip
                    append(_new(RequestUpdate, news))
                continue
            if row.request_id in failed:
                self._finish(request, FinishReason.ERROR)
                append(update_of(request, (), None, failed[row.request_id]))
            elif row[samples_at]:
                token_ids = self._append(request, token_ids, now)
                counted += [request] * len(token_ids)
                updates += self._tell(request, token_ids, row_logprobs, tell_all)
        if counts:
            self._sampled(counted)
        return tuple(updates)

    def _append(self, request: Request, token_ids: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Append tokens until one ends the output, and return them; () ends a pooling request."""
        if request.first_token_time is None:
            request.first_token_time = now
            self._state.totals.num_first_tokens += 1
            self._state.totals.num_prompt_tokens += request.num_prompt_tokens
            history = request.history
            if history.forecast is not None:
                news = history.forecast, now - request.asked.arrival_time, history.demoted
                self._state.last.first_tokens.append(news)
        if not token_ids:
            self._finish(request, FinishReason.STOP)
        sampling = request.asked.sampling
        for count, token_id in enumerate(token_ids, 1):
            request.output_token_ids.append(token_id)
            request.num_tokens += 1
            num_output = request.num_tokens - request.num_prompt_tokens
            if token_id in request.stop_ids and num_output >= sampling.min_tokens:
                if token_id not in sampling.eos_token_ids:
                    request.stop_reason = token_id
                self._finish(request, FinishReason.STOP)
            elif request.num_tokens >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH)
            else:
                continue
            return token_ids[:count]
        return token_ids

    def _tell(
        self, request: Request, token_ids: tuple[int, ...], logprobs: _Logprobs, tell_all: bool
    ) -> Iterator[RequestUpdate]:
        """Yield the update of a request with these new tokens, if it is to be sent."""
        if tell_all or request.finish_reason is not None:
            yield update_of(request, token_ids, logprobs)
        request.timeline_sent = True


def update_of(
    request: Request, token_ids: tuple[int, ...], logprobs: _Logprobs, error: str | None = None
) -> RequestUpdate:
    """Return the update of a request with these new tokens, with its timeline if this is the last
    update or the caller was not sent the timeline since it changed."""
    tells = request.finish_reason is not None or not request.timeline_sent
    # tokens after the one that ended the request are dropped
    kept = None if logprobs is None else logprobs[: len(token_ids)]
    news = (
        request.request_id, token_ids, kept, request.finish_reason, request.stop_reason,
        request.num_cached_tokens, request.first_scheduled_time or 0.0, request.num_preemptions,
        error, _timeline_of(request) if tells else None,
    )  # fmt: skip
    return _new(RequestUpdate, news)


def _timeline_of(request: Request) -> Timeline:
    history = request.history
    waited = tuple([each for each in zip(REASONS, history.waits, strict=False) if each[1]])
    drafts = tuple([(source, *counts) for source, counts in history.drafts.items()])
    story = (
        waited, history.num_chunks, request.num_preemptions, history.num_recomputed_tokens,
        history.num_restored_tokens, history.demoted, history.predicted_ttft, drafts,
    )  # fmt: skip
    return _new(Timeline, story)
