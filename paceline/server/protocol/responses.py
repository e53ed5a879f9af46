"""The bodies of answers, as msgspec structs: one definition for whole answers and chunks.

Field order and names follow vLLM. ``UNSET`` fields are omitted: a chunk carries only what it adds.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from paceline.engine.types import RequestTimes, Timeline

__all__ = [
    "UNSET",
    "CalledFunction",
    "ChatAnswer",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "CompletionAnswer",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionChunkChoice",
    "CompletionLogprobs",
    "DraftCount",
    "Explanation",
    "FunctionDelta",
    "PromptLogprob",
    "PromptTokensDetails",
    "RequestMetrics",
    "Timings",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnsetType",
    "Usage",
    "encode",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    # read from the prefix cache
    cached_tokens: int
    # computed for this request and stored there
    cache_write_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    # set for models that reason
    reasoning_tokens: int | UnsetType = UNSET
    # verified draft tokens from the request's ``prediction``: accepted ones, and rejected ones,
    # which are not tokens of the answer
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class DraftCount(msgspec.Struct, frozen=True):
    verified_tokens: int
    accepted_tokens: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A ``core.outputs.Timeline`` for callers, in milliseconds instead of seconds."""

    queued_ms: float
    # milliseconds of waiting by reason, see docs/use/why-it-waited.md
    waited_ms: dict[str, float]
    chunks: int
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    demoted: bool
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    # the longest pause between two tokens; None for a single delivery
    longest_gap_ms: float | None
    # rate of this choice after its first token; None for a single token
    tokens_per_second: float | None
    # verified draft tokens by source; sources without any are absent
    speculation: dict[str, DraftCount]

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        ttft: float | None,
        longest_gap: float | None,
        tokens_per_second: float | None,
    ) -> Explanation:
        waited = {reason: round(1e3 * seconds, 3) for reason, seconds in timeline.waited}
        predicted = timeline.predicted_ttft
        return cls(
            queued_ms=round(sum(waited.values()), 3),
            waited_ms=waited,
            chunks=timeline.num_chunks,
            preemptions=timeline.num_preemptions,
            recomputed_tokens=timeline.num_recomputed_tokens,
            swapped_tokens=timeline.num_swapped_tokens,
            demoted=timeline.demoted,
            predicted_ttft_ms=None if predicted is None else round(1e3 * predicted, 3),
            ttft_ms=None if ttft is None else round(1e3 * ttft, 3),
            longest_gap_ms=None if longest_gap is None else round(1e3 * longest_gap, 3),
            tokens_per_second=tokens_per_second,
            speculation={
                source: DraftCount(verified, accepted)
                for source, verified, accepted in timeline.drafts
            },
        )


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's times of one request, in milliseconds; None where a single token gives no rate."""

    # from its first step to its first token; the wait before that is queue_time_ms
    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    # counted from its first step to its last token
    tokens_per_second: float | None

    @classmethod
    def of(cls, times: RequestTimes, num_tokens: int) -> RequestMetrics:
        generating = times.last_token - times.first_token
        running = times.last_token - times.first_scheduled
        return cls(
            time_to_first_token_ms=1e3 * (times.first_token - times.first_scheduled),
            generation_time_ms=1e3 * generating,
            queue_time_ms=1e3 * (times.first_scheduled - times.arrival),
            mean_itl_ms=1e3 * generating / (num_tokens - 1) if num_tokens > 1 else None,
            tokens_per_second=num_tokens / running if running > 0.0 else None,
        )


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's times of one request, in milliseconds, and tokens; None where nothing was
    computed or no time has passed. As there, the first token counts as predicted, but its time
    belongs to the prompt."""

    # prompt tokens from the prefix cache, and computed ones
    cache_n: int
    prompt_n: int
    # from its first step to its first token
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, times: RequestTimes | None, prompt: int, cached: int, predicted: int) -> Timings:
        prompt_ms = predicted_ms = 0.0
        if times is not None:
            prompt_ms = 1e3 * (times.first_token - times.first_scheduled)
            predicted_ms = 1e3 * (times.last_token - times.first_token)
        computed = prompt - cached
        return cls(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / computed if computed else None,
            prompt_per_second=1e3 * computed / prompt_ms if prompt_ms else None,
            predicted_n=predicted,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / predicted if predicted else None,
            predicted_per_second=1e3 * predicted / predicted_ms if predicted_ms else None,
        )


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # set for models that reason, and for requests with a prediction
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    # an explanation of each choice, if ``explain`` was requested
    timeline: list[Explanation] | UnsetType = UNSET
    # the request missed a target and was demoted; set only then
    demoted: bool | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        prompt: int,
        completion: int,
        cached: int,
        timeline: list[Explanation] | UnsetType = UNSET,
        *,
        written: int = 0,
        reasoning: int | None = None,
        demoted: bool = False,
        predicted: tuple[int, int] | None = None,
    ) -> Usage:
        details: CompletionTokensDetails | UnsetType = UNSET
        if reasoning is not None or predicted is not None:
            accepted, rejected = (UNSET, UNSET) if predicted is None else predicted
            thought = UNSET if reasoning is None else reasoning
            details = CompletionTokensDetails(thought, accepted, rejected)
        return cls(
            prompt,
            prompt + completion,
            completion,
            PromptTokensDetails(cached, written),
            details,
            timeline,
            demoted or UNSET,
        )

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        if details is UNSET or details.reasoning_tokens is UNSET:
            return 0
        return details.reasoning_tokens

    def explanation(self) -> dict[str, Any]:
        """Return the fields besides counts, for APIs whose counts have other names."""
        optional = {"timeline": self.timeline, "demoted": self.demoted}
        return {name: value for name, value in optional.items() if value is not UNSET}


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    # null for the first token of an echoed prompt, here and in top_logprobs
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    # JSON text
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | None
    refusal: str | None = None
    # vLLM's name for reasoning, and the older one, which many clients read
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] = ()


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    metrics: RequestMetrics | None
    timings: Timings | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    # set on the first delta of a call, with the name
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    # set on the chunk that ends a choice, and on the usage
    system_fingerprint: str | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    metrics: RequestMetrics | None
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    # set on the chunk that ends a choice, and on the usage
    system_fingerprint: str | UnsetType = UNSET
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


_ENCODER: Final = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Return ``value`` as JSON; it may be anything msgspec can write."""
    return _ENCODER.encode(value)
