"""Code that answers of chat and completions share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from paceline.core.sampling_params import SamplingParams
from paceline.engine.protocol import Tokenizer
from paceline.engine.types import (
    GenerationOutput,
    GenerationRequest,
    RequestTimes,
    Resume,
    ResumedChoice,
    TokenLogprobs,
    tokens_per_second,
)
from paceline.http.sse import DONE, TextEvents, TokenEvents, event
from paceline.server.apis.openai.logprobs import TokenWriter
from paceline.server.generation.prompts import sampling_for, truncated
from paceline.server.generation.service import LOAD_WAIT, Service
from paceline.server.protocol.requests import GenerationOptions
from paceline.server.protocol.responses import (
    UNSET,
    ChatChunk,
    ChatChunkChoice,
    CompletionChunk,
    CompletionChunkChoice,
    Explanation,
    RequestMetrics,
    Timings,
    UnsetType,
    Usage,
    encode,
)
from paceline.speculation.draft_tokens import PREDICTION

__all__ = [
    "AnswerHead",
    "Choice",
    "Chunks",
    "Collected",
    "PlainEvents",
    "UsageCount",
    "collect",
    "generation_request",
    "prepared",
]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Fields that every chunk of an answer repeats."""

    id: str
    # unix time
    created: int
    model: str
    # tells requests apart in the engine, since two callers may send the same X-Request-Id
    nonce: str
    # hash of the model, its formats and the software
    fingerprint: str
    # None: not requested
    service_tier: str | None = None

    @classmethod
    def of(
        cls,
        prefix: str,
        request_id: str,
        service: Service,
        options: GenerationOptions | None = None,
    ) -> AnswerHead:
        """Return the head of an answer; without ``options``, of one without adapter and tier."""
        adapter = None if options is None else options.adapter
        return cls(
            f"{prefix}-{request_id}",
            int(time.time()),
            service.model_name if adapter is None else adapter.name,
            token_hex(8),
            service.fingerprint,
            None if options is None else options.service_tier,
        )

    def engine_id(self, index: int) -> str:
        """Return the engine's id for prompt ``index``: unique, and contains the caller's id."""
        return f"{self.id}-{self.nonce}-{index}"


class PlainEvents:
    """Renders events of deliveries that only add text, or token ids if requested, to a choice. The
    rest of such an event is rendered once per choice.

    Args:
        name: key of the text in an event.
    """

    def __init__(self, name: str, wants_ids: bool) -> None:
        self._name = name
        self._wants_ids = wants_ids
        # by choice
        self._events: dict[int, TextEvents | TokenEvents] = {}

    def of(self, output: GenerationOutput, example: Callable[[int], bytes]) -> bytes:
        """Return the events of a delivery that ends no choice. The last one brings the counts.

        Args:
            example: renders an event of a choice with an empty text, and empty ids if requested.
                Not kept: it belongs to the stream that keeps this, and with it the prompt's ids.
        """
        data = b""
        for delta in output.choices:
            # ids may come without text, for parts of a character
            if delta.token_ids if self._wants_ids else delta.text:
                events = self._events.get(delta.index)
                if events is None:
                    kind = TokenEvents if self._wants_ids else TextEvents
                    events = self._events[delta.index] = kind(example(delta.index), self._name)
                data += events.event(delta.text, delta.token_ids)
        return data


class UsageCount:
    """Token counts of an answer, over all its prompts, and explanations of its choices."""

    def __init__(self, num_prompts: int, options: GenerationOptions) -> None:
        self._rows = [(0, 0, 0)] * num_prompts
        # tokens of a block of the prefix cache; 0: no cache
        self._cache_block = options.cache_block
        # report vLLM's times, only for a single prompt and choice; and llama-server's
        self._tells_metrics = options.tells_metrics and options.n == num_prompts == 1
        self._tells_timings = options.tells_timings
        self._times: RequestTimes | None = None
        # why each choice waited; None: not explained
        explained: dict[tuple[int, int], Explanation] = {}
        self._timelines = explained if options.explain else None
        self._demoted = False
        # accepted and rejected draft tokens of each choice; None: no prediction
        drafted: dict[tuple[int, int], tuple[int, int]] = {}
        self._predicted = None if options.prediction is None else drafted
        # reasoning tokens; None: the model does not reason
        self._reasoning: int | None = None
        # one choice per prompt: its tokens are the prompt's; those made before a resumption belong
        # to the prompt and not to this speed
        self._single = options.n == 1 and not options.resume_output_ids
        # tokens of each choice so far; only counted if its speed is reported
        self._tokens: Counter[tuple[int, int]] = Counter()

    def expect(self, index: int, num_prompt_tokens: int) -> None:
        """Count a prompt without output yet."""
        self._rows[index] = (num_prompt_tokens, 0, 0)

    def update(self, index: int, output: GenerationOutput) -> None:
        self._rows[index] = (
            output.num_prompt_tokens,
            output.num_output_tokens,
            output.num_cached_tokens,
        )
        self._times = output.times
        self._demoted |= any(d.timeline is not None and d.timeline.demoted for d in output.choices)
        if self._predicted is not None:
            for delta in output.choices:
                if delta.timeline is not None:
                    drafts = {source: counts for source, *counts in delta.timeline.drafts}
                    verified, right = drafts.get(PREDICTION, (0, 0))
                    self._predicted[index, delta.index] = right, verified - right
        if self._timelines is None:
            return
        times = output.times
        ttft = None if times is None else times.first_token - times.arrival
        for delta in output.choices:
            self._tokens[index, delta.index] += len(delta.token_ids)
            if delta.timeline is not None:
                seconds = 0.0 if times is None else times.last_token - times.first_token
                # a shortcut takes deltas of a single choice past this count
                made = self._tokens[index, delta.index]
                made = output.num_output_tokens if self._single else made
                speed = tokens_per_second(made, 1, seconds)
                gap = None if times is None or not times.longest_gap else times.longest_gap
                explained = Explanation.of(delta.timeline, ttft, gap, speed)
                self._timelines[index, delta.index] = explained

    def add_reasoning(self, num_tokens: int) -> None:
        """Count reasoning tokens; 0 says that the model reasons."""
        self._reasoning = (self._reasoning or 0) + num_tokens

    def usage(self) -> Usage:
        prompt, completion, cached = (sum(column) for column in zip(*self._rows, strict=True))
        timeline: list[Explanation] | UnsetType = UNSET
        if self._timelines is not None:
            timeline = [self._timelines[key] for key in sorted(self._timelines)]
        return Usage.of(
            prompt,
            completion,
            cached,
            timeline,
            written=self._written(),
            reasoning=self._reasoning,
            demoted=self._demoted,
            predicted=None
            if self._predicted is None
            else (
                sum(right for right, _ in self._predicted.values()),
                sum(wrong for _, wrong in self._predicted.values()),
            ),
        )

    def metrics(self) -> RequestMetrics | None:
        """Return the metrics of an ended answer; None if they are not reported."""
        if not self._tells_metrics or self._times is None:
            return None
        return RequestMetrics.of(self._times, self._rows[0][1])

    def timings(self) -> Timings | UnsetType:
        """Return the timings so far; UNSET if they are not reported."""
        if not self._tells_timings:
            return UNSET
        prompt, predicted, cached = self._rows[0]
        return Timings.of(self._times, prompt, cached, predicted)

    def _written(self) -> int:
        """Return the computed prompt tokens that stay in the cache: those of full blocks."""
        block = self._cache_block
        if not block:
            return 0
        return sum(max(0, prompt // block * block - cached) for prompt, _, cached in self._rows)


class Chunks:
    """The chunks of a streamed answer of chat or completions.

    Args:
        kind: their type.
    """

    def __init__(
        self,
        kind: type[ChatChunk] | type[CompletionChunk],
        head: AnswerHead,
        options: GenerationOptions,
        tokenizer: Tokenizer,
        count: UsageCount,
    ) -> None:
        self._kind: Callable[..., ChatChunk | CompletionChunk] = kind
        self._head, self._count = head, count
        self._include_usage = options.include_usage
        self.wants_ids = options.return_token_ids
        self.continuous = options.continuous_usage
        # None: log-probabilities are not reported
        self.writer: TokenWriter | None = None
        if options.sampling.logprobs is not None:
            self.writer = TokenWriter(tokenizer, as_ids=options.return_tokens_as_token_ids)

    @property
    def plain(self) -> bool:
        """Whether the chunk of a middle delta holds only text, and ids if requested."""
        return not (self.writer or self.continuous)

    def tells(self, token_ids: Sequence[int]) -> bool:
        """Return whether tokens are sent even if they make no text yet."""
        return bool(token_ids) and (self.wants_ids or not self.plain)

    def event(self, choice: ChatChunkChoice | CompletionChunkChoice, **more: Any) -> bytes:
        """Return the event of one choice."""
        ends, count = choice.finish_reason is not None, self._count
        usage = count.usage() if self.continuous else UNSET
        timings = count.timings() if ends else UNSET
        return self._event([choice], ends, usage=usage, timings=timings, **more)

    def end(self) -> bytes:
        """Return the usage chunk, if requested, and the end of the stream."""
        if not self._include_usage:
            return DONE
        metrics = self._count.metrics() or UNSET
        return self._event([], True, usage=self._count.usage(), metrics=metrics) + DONE

    def _event(self, choices: list[Any], ends: bool, **more: Any) -> bytes:
        head = self._head
        chunk = self._kind(
            id=head.id,
            created=head.created,
            model=head.model,
            service_tier=head.service_tier or UNSET,
            system_fingerprint=head.fingerprint if ends else UNSET,
            choices=choices,
            **more,
        )
        return event(encode(chunk))


class News(Protocol):
    """An addition to a choice: a ``ChoiceDelta``, or a piece of a chat."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def stop_reason(self) -> int | str | None: ...


@dataclass(slots=True)
class Choice:
    """One whole choice of an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: News) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


@dataclass(frozen=True, slots=True)
class Collected:
    """A whole answer."""

    # choice c of prompt p is at p * n + c
    choices: list[Choice]
    usage: Usage
    metrics: RequestMetrics | None
    timings: Timings | UnsetType
    # one per prompt; None if not requested
    prompt_logprobs: list[tuple[TokenLogprobs, ...] | None]


async def collect(
    outputs: AsyncIterator[tuple[int, GenerationOutput]],
    num_prompts: int,
    options: GenerationOptions,
) -> Collected:
    """Collect all outputs to the end."""
    n = options.n
    choices = [Choice() for _ in range(num_prompts * n)]
    count = UsageCount(num_prompts, options)
    prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * num_prompts
    async for index, output in outputs:
        count.update(index, output)
        if output.prompt_logprobs is not None:
            prompt_logprobs[index] = output.prompt_logprobs
        for delta in output.choices:
            choices[index * n + delta.index].add(delta)
    return Collected(choices, count.usage(), count.metrics(), count.timings(), prompt_logprobs)


async def prepared(
    service: Service,
    request_id: str,
    prompt: list[int],
    options: GenerationOptions,
    arrival_time: float,
    default_max_tokens: int | None,
    bad_words: tuple[tuple[int, ...], ...] | None = None,
) -> GenerationRequest:
    """Return the engine's request for a prompt, cut as its options say.

    Args:
        bad_words: those of the options as ids, where they are known already.

    Raises what ``sampling_for`` raises, and InvalidRequestError.
    """
    most, prompts = service.rules.max_model_len, service.prompts
    prompt = truncated(prompt, options, most)
    if bad_words is None:
        bad_words = await prompts.bad_words(options.bad_words)
    sampling = sampling_for(
        prompt,
        options,
        max_model_len=most,
        default_max_tokens=default_max_tokens,
        bad_words=bad_words,
    )
    prediction = await prompts.prediction(options.prediction, sampling.max_tokens)
    return generation_request(request_id, prompt, sampling, options, arrival_time, prediction)


def generation_request(
    request_id: str,
    prompt: list[int],
    sampling: SamplingParams,
    options: GenerationOptions,
    arrival_time: float,
    prediction: tuple[int, ...] = (),
) -> GenerationRequest:
    """Return an engine request. ``request_id`` must be unique in the engine; arrival in seconds of
    ``time.monotonic()``; ``prediction`` is the caller's, as ids."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        n=options.n,
        stop=options.stop,
        include_stop_str_in_output=options.include_stop_str_in_output,
        skip_special_tokens=options.skip_special_tokens,
        detokenize=options.detokenize,
        arrival_time=arrival_time,
        load_wait=LOAD_WAIT.get(),
        priority=options.priority,
        cache_salt=options.cache_salt,
        slo=options.slo,
        tenant=options.tenant,
        resume=Resume(
            choices=tuple(
                ResumedChoice(token_ids=ids or (), ended=ids is None)
                for ids in options.resume_output_ids
            )
        )
        if options.resume_output_ids
        else None,
        whole=not options.stream,
        max_draft_tokens=options.max_draft_tokens,
        prediction=prediction,
        store=options.store,
        adapter=None if options.adapter is None else options.adapter.key,
        adapter_scale=1.0 if options.adapter is None else options.adapter.scale,
        kv_source=options.kv_source,
    )
