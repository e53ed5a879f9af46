"""``POST /v1/completions``, from the parsed request to the bytes of the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from paceline.engine.protocol import Tokenizer
from paceline.engine.types import ChoiceDelta, GenerationOutput, TokenLogprobs
from paceline.http.shortcut import Shortcut
from paceline.server.apis.openai.answers import (
    AnswerHead,
    Choice,
    Chunks,
    PlainEvents,
    UsageCount,
    collect,
    prepared,
)
from paceline.server.apis.openai.logprobs import (
    TokenWriter,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs_json,
)
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import CompletionRequest
from paceline.server.protocol.responses import (
    UNSET,
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    encode,
)

__all__ = ["CompletionStream", "completion_answer", "completion_events"]

# OpenAI's default for this endpoint
_DEFAULT_MAX_TOKENS: Final = 16


async def completion_events(
    service: Service,
    request: CompletionRequest,
    request_id: str,
    arrival: float,
    shortcut: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer; the last one is ``DONE``.

    Errors before the first event are raised from the first ``anext``.
    """
    head = AnswerHead.of("cmpl", request_id, service, request.options)
    prompts, outputs = await _start(service, request, head, arrival, shortcut)
    echoes = await _echoes(service, request, prompts)
    stream = CompletionStream(head, request, prompts, echoes, service.client.tokenizer)
    # several prompts share the answer, and none of them uses the shortcut
    shortcut.render_with(stream.middle)
    async with aclosing(outputs):
        async for index, output in outputs:
            data = stream.events(index, output)
            if data:
                yield data
    yield stream.end()


async def completion_answer(
    service: Service, request: CompletionRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer that is not streamed."""
    head = AnswerHead.of("cmpl", request_id, service, request.options)
    prompts, outputs = await _start(service, request, head, arrival)
    n = request.options.n
    async with aclosing(outputs):
        whole = await collect(outputs, len(prompts), request.options)
    echoes = await _echoes(service, request, prompts)
    writer = _writer(request, service.client.tokenizer)
    echoed = whole.prompt_logprobs
    return encode(
        CompletionAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            service_tier=head.service_tier,
            system_fingerprint=head.fingerprint,
            choices=[
                _choice(i, choice, echoes[i // n], prompts[i // n], request, writer, echoed[i // n])
                for i, choice in enumerate(whole.choices)
            ],
            usage=whole.usage,
            metrics=whole.metrics,
            timings=whole.timings,
        )
    )


async def _start(
    service: Service,
    request: CompletionRequest,
    head: AnswerHead,
    arrival: float,
    shortcut: Shortcut[GenerationOutput] | None = None,
) -> tuple[list[list[int]], AsyncGenerator[tuple[int, GenerationOutput], None]]:
    default = int(service.rules.default_sampling.get("max_new_tokens", _DEFAULT_MAX_TOKENS))
    options, prompts = request.options, await service.prompts.completion(request)
    words = await service.prompts.bad_words(options.bad_words)
    requests = [
        await prepared(service, head.engine_id(i), prompt, options, arrival, default, words)
        for i, prompt in enumerate(prompts)
    ]
    prompts = [asked.prompt_token_ids for asked in requests]
    if request.only_prompt:
        return prompts, _of_prompts(service.run(requests))
    return prompts, service.run(requests, shortcut)


async def _of_prompts(
    outputs: AsyncGenerator[tuple[int, GenerationOutput], None],
) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    """Yield ``outputs`` without the token that the engine draws behind each prompt."""
    async with aclosing(outputs):
        async for index, output in outputs:
            choices = tuple(
                ChoiceDelta(
                    index=delta.index,
                    text="",
                    token_ids=(),
                    # the actual reason may come from the dropped token, such as a stop string in it
                    finish_reason=None if delta.finish_reason is None else "length",
                    timeline=delta.timeline,
                )
                for delta in output.choices
            )
            yield index, msgspec.structs.replace(output, choices=choices, num_output_tokens=0)


async def _echoes(
    service: Service, request: CompletionRequest, prompts: Sequence[list[int]]
) -> list[str]:
    """Return the text before each prompt's output: with ``echo`` the prompt's, else ""."""
    if not request.echo:
        return [""] * len(prompts)
    return [
        # a truncated prompt differs from the given text
        given
        if isinstance(given, str) and request.options.truncate_prompt_tokens is None
        else await service.prompts.decode(prompt)
        for given, prompt in zip(request.prompts, prompts, strict=True)
    ]


def _writer(request: CompletionRequest, tokenizer: Tokenizer) -> TokenWriter:
    return TokenWriter(tokenizer, as_ids=request.options.return_tokens_as_token_ids)


def _choice(
    index: int,
    choice: Choice,
    echo: str,
    prompt: list[int],
    request: CompletionRequest,
    writer: TokenWriter,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
) -> CompletionChoice:
    options = request.options
    logprobs = None
    if options.sampling.logprobs is not None:
        offset, echoed = 0, None
        if request.echo and prompt_logprobs is not None:
            echoed, offset = echoed_logprobs(prompt, prompt_logprobs, writer)
        logprobs, _ = completion_logprobs(choice.logprobs, writer, offset)
        if echoed is not None:
            logprobs = CompletionLogprobs(
                echoed.text_offset + logprobs.text_offset,
                echoed.token_logprobs + logprobs.token_logprobs,
                echoed.tokens + logprobs.tokens,
                echoed.top_logprobs + logprobs.top_logprobs,
            )
    return CompletionChoice(
        index=index,
        text=echo + "".join(choice.text),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if options.return_token_ids else None,
        prompt_token_ids=prompt if options.return_token_ids else None,
        prompt_logprobs=prompt_logprobs_json(prompt, prompt_logprobs, writer)
        if request.tells_prompt_logprobs
        else None,
    )


class CompletionStream:
    """Turns deltas into events. Pure: bytes out, nothing sent."""

    def __init__(
        self,
        head: AnswerHead,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        self._prompts = prompts
        self._echoes = echoes
        options = request.options
        self._n = options.n
        self._usage = UsageCount(len(prompts), options)
        self._chunks = Chunks(CompletionChunk, head, options, tokenizer, self._usage)
        self._middle = PlainEvents("text", self._chunks.wants_ids)
        self.end = self._chunks.end
        choices = len(prompts) * options.n
        self._begun = [False] * choices
        # per choice, characters of the tokens sent so far
        self._offsets = [0] * choices
        # log-probabilities of prompts, in requests for nothing else
        self._echoed: list[tuple[TokenLogprobs, ...] | None] = [None] * len(prompts)

    def events(self, prompt: int, output: GenerationOutput) -> bytes:
        """Return the events of one delivery for prompt number ``prompt``; empty when there is
        nothing to send yet, such as half a character."""
        self._usage.update(prompt, output)
        if output.prompt_logprobs is not None:
            self._echoed[prompt] = output.prompt_logprobs
        data = b""
        for delta in output.choices:
            index = prompt * self._n + delta.index
            first = not self._begun[index]
            if (
                delta.text
                or delta.finish_reason
                or (first and self._echoes[prompt])
                or self._chunks.tells(delta.token_ids)
            ):
                self._begun[index] = True
                data += self._chunk(index, prompt, first, delta)
        return data

    def middle(self, output: GenerationOutput) -> bytes:
        """Return ``events`` of the only prompt, for a delivery that begins and ends no choice."""
        # the first delivery may have been another choice's
        if not self._chunks.plain or not all(self._begun):
            return self.events(0, output)
        return self._middle.of(output, self._example)

    def _example(self, index: int) -> bytes:
        """Return a chunk that adds an empty text to a choice that has begun."""
        token_ids = () if self._chunks.wants_ids else UNSET
        return self._chunks.event(CompletionChunkChoice(index=index, text="", token_ids=token_ids))

    def _chunk(self, index: int, prompt: int, first: bool, delta: ChoiceDelta) -> bytes:
        logprobs, writer, wants_ids = None, self._chunks.writer, self._chunks.wants_ids
        if writer is not None and delta.logprobs:
            logprobs, self._offsets[index] = completion_logprobs(
                delta.logprobs, writer, self._offsets[index]
            )
        elif writer is not None and first and (echoed := self._echoed[prompt]) is not None:
            logprobs, _ = echoed_logprobs(self._prompts[prompt], echoed, writer)
        choice = CompletionChunkChoice(
            index=index,
            text=self._echoes[prompt] + delta.text if first else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason is not None else UNSET,
            token_ids=delta.token_ids if wants_ids else UNSET,
            prompt_token_ids=self._prompts[prompt] if first and wants_ids else UNSET,
        )
        return self._chunks.event(choice)
