"""What a step's result means for one request, and how its caller is told."""

from __future__ import annotations

from paceline.core.outputs import RequestUpdate, Timeline, TokenLogprobs
from paceline.core.queues.wait_clocks import REASONS
from paceline.core.request import FinishReason, Request

__all__ = ["append_all", "update_of"]

# a NamedTuple made by tuple's constructor costs half of one made by its own
_new = tuple.__new__


def append_all(
    request: Request, token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Add tokens until one ends the output. Returns those that count, and why it ended."""
    for count, token_id in enumerate(token_ids, 1):
        reason = request.append_output(token_id)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def update_of(
    request: Request,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    error: str | None = None,
    *,
    tells: bool = False,
) -> RequestUpdate:
    """The news of a request with these new tokens; its timeline with the last, and with those
    that tell it."""
    return _new(
        RequestUpdate,
        (
            request.request_id,
            token_ids,
            logprobs,
            request.finish_reason,
            request.stop_reason,
            request.history.num_cached_tokens,
            request.first_scheduled_time or 0.0,
            request.num_preemptions,
            error,
            _timeline_of(request) if tells or request.finish_reason is not None else None,
        ),
    )


def _timeline_of(request: Request) -> Timeline:
    return Timeline(
        waited=tuple(
            (reason, seconds)
            for reason, seconds in zip(REASONS, request.history.waits, strict=False)
            if seconds > 0.0
        ),
        num_chunks=request.history.num_chunks,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.history.num_recomputed_tokens,
        num_swapped_tokens=request.history.num_restored_tokens,
        relegated=request.history.demoted,
        predicted_ttft=request.history.predicted_ttft,
    )
