"""``POST /v1/chat/completions``, from the parsed request to the bytes of the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paceline.engine.protocol import Tokenizer
from paceline.engine.types import ChoiceDelta, GenerationOutput
from paceline.http.shortcut import Shortcut
from paceline.http.sse import DONE, TextEvents, event
from paceline.server.bodies.protocol import ChatRequest
from paceline.server.bodies.wire import (
    UNSET,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    UnsetType,
    Usage,
    encode,
)
from paceline.server.openai.answers import (
    AnswerHead,
    Choice,
    UsageCount,
    collect,
    generation_request,
)
from paceline.server.openai.logprobs import TokenWriter, chat_logprobs, prompt_logprobs_json
from paceline.server.prompts import sampling_for, truncated
from paceline.server.service import Service

__all__ = ["ChatStream", "chat_answer", "chat_events", "start_chat"]

# a chunk that carries news other than text still has a delta with content, as ever
_NOTHING = ChatDelta(content="")


async def chat_events(
    service: Service,
    request: ChatRequest,
    request_id: str,
    arrival: float,
    shortcut: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; the last one is ``DONE``.

    Errors before the first event are raised from the first ``anext``.
    """
    head = AnswerHead.of("chatcmpl", request_id, service.model_name)
    prompt, outputs = await start_chat(service, request, head, arrival, shortcut)
    stream = ChatStream(head, request, prompt, service.client.tokenizer)
    shortcut.render_with(stream.middle)
    async with aclosing(outputs):
        async for _, output in outputs:
            data = stream.events(output)
            if data:
                yield data
    yield stream.end()


async def chat_answer(
    service: Service, request: ChatRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer that is not streamed."""
    head = AnswerHead.of("chatcmpl", request_id, service.model_name)
    prompt, outputs = await start_chat(service, request, head, arrival)
    options = request.options
    async with aclosing(outputs):
        whole = await collect(outputs, 1, options.n, explain=options.explain)
    writer = _writer(request, service.client.tokenizer)
    return encode(
        ChatAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[_choice(i, choice, request, writer) for i, choice in enumerate(whole.choices)],
            usage=whole.usage,
            prompt_logprobs=prompt_logprobs_json(prompt, whole.prompt_logprobs[0], writer),
            prompt_token_ids=prompt if options.return_token_ids else None,
        )
    )


async def start_chat(
    service: Service,
    request: ChatRequest,
    head: AnswerHead,
    arrival: float,
    shortcut: Shortcut[GenerationOutput] | None = None,
) -> tuple[list[int], AsyncGenerator[tuple[int, GenerationOutput], None]]:
    """The prompt's ids, and its deltas as they come, less what ``shortcut`` takes."""
    options = request.options
    max_model_len = service.rules.max_model_len
    prompt = await service.prompts.chat(
        request.template, add_special_tokens=options.add_special_tokens
    )
    prompt = truncated(prompt, options, max_model_len)
    default = service.rules.default_sampling.get("max_new_tokens")
    sampling = sampling_for(
        prompt,
        options,
        max_model_len=max_model_len,
        default_max_tokens=None if default is None else int(default),
        bad_words=await service.prompts.bad_words(options.bad_words),
    )
    engine_request = generation_request(head.engine_id(0), prompt, sampling, options, arrival)
    return prompt, service.run((engine_request,), shortcut)


def _writer(request: ChatRequest, tokenizer: Tokenizer) -> TokenWriter:
    return TokenWriter(tokenizer, as_ids=request.options.return_tokens_as_token_ids)


def _role(request: ChatRequest) -> str:
    """Who speaks: without a generation prompt, whoever spoke last goes on."""
    template = request.template
    if template.add_generation_prompt:
        return "assistant"
    role: str = template.messages[-1]["role"]
    return role


def _choice(index: int, choice: Choice, request: ChatRequest, writer: TokenWriter) -> ChatChoice:
    options = request.options
    wanted = options.sampling.logprobs is not None
    content: str | None = "".join(choice.text)
    calls: tuple[ToolCall, ...] = ()
    reason = choice.finish_reason
    plan = request.template.tools
    if plan is not None and plan.calls:
        collector = plan.collector()
        content, _ = collector.push(content or "", last=True)
        calls = tuple(
            ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))
            for call in collector.calls
        )
        if (calls or plan.forced) and not content:
            content = None
        reason = plan.finish_reason(reason, called=bool(calls))
    return ChatChoice(
        index=index,
        message=ChatMessage(role=_role(request), content=content, tool_calls=calls),
        logprobs=chat_logprobs(choice.logprobs, writer) if wanted else None,
        finish_reason=reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if options.return_token_ids else None,
    )


class ChatStream:
    """Turns deltas into events. Pure: bytes out, nothing sent."""

    def __init__(
        self, head: AnswerHead, request: ChatRequest, prompt: list[int], tokenizer: Tokenizer
    ) -> None:
        self._head = head
        self._request = request
        self._prompt = prompt
        options = request.options
        self._wants_ids = options.return_token_ids
        self._continuous = options.continuous_usage
        self._writer = None if options.sampling.logprobs is None else _writer(request, tokenizer)
        self._usage = UsageCount(1, explain=options.explain)
        self._begun = False
        plan = request.template.tools
        self._plan = plan if plan is not None and plan.calls else None
        # a delta that goes on is its text and nothing else
        self._only_text = not (self._plan or self._writer or self._wants_ids or self._continuous)
        # by choice
        self._texts: dict[int, TextEvents] = {}
        self._collectors = [self._plan.collector() for _ in range(options.n)] if self._plan else []

    def events(self, output: GenerationOutput) -> bytes:
        """The events of one delivery, preceded by the role chunks if it is the first one.

        Empty when there is nothing to tell yet, such as half a character.
        """
        self._usage.update(0, output)
        data = b""
        if not self._begun:
            self._begun = True
            data = self._begin()
        for delta in output.choices:
            part = self._part(delta)
            if part is not _NOTHING or delta.finish_reason or self._tells_tokens(delta):
                data += self._chunk(self._delta(delta, part))
        return data

    def middle(self, output: GenerationOutput) -> bytes:
        """``events``, for a delivery that is not the first and ends no choice."""
        if not self._only_text:
            return self.events(output)
        # counts are told at the end, and the last delivery has them
        data = b""
        for delta in output.choices:
            if delta.text:
                texts = self._texts.get(delta.index) or self._text_events(delta.index)
                data += texts.event(delta.text)
        return data

    def end(self) -> bytes:
        """The usage chunk, if asked for, and the end of the stream."""
        if not self._request.options.include_usage:
            return DONE
        head = self._head
        chunk = ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[],
            usage=self._usage.usage(),
        )
        return event(encode(chunk)) + DONE

    def _text_events(self, index: int) -> TextEvents:
        """Of chunks that add text to a choice."""
        example = self._chunk(ChatChunkChoice(index=index, delta=_NOTHING))
        self._texts[index] = TextEvents(example, "content")
        return self._texts[index]

    def _begin(self) -> bytes:
        data = b""
        delta = ChatDelta(role=_role(self._request), content="")
        for index in range(self._request.options.n):
            prompt = self._prompt if self._wants_ids and index == 0 else UNSET
            data += self._chunk(ChatChunkChoice(index=index, delta=delta), prompt)
        return data

    def _tells_tokens(self, delta: ChoiceDelta) -> bool:
        """Whether the tokens themselves go out, even where they make no text yet."""
        return bool(delta.token_ids) and (
            self._wants_ids or self._continuous or self._writer is not None
        )

    def _part(self, delta: ChoiceDelta) -> ChatDelta:
        """What a delivery adds to the message; ``_NOTHING`` where that is nothing."""
        if self._plan is None:
            return ChatDelta(content=delta.text) if delta.text else _NOTHING
        collector = self._collectors[delta.index]
        content, pieces = collector.push(delta.text, last=delta.finish_reason is not None)
        if not pieces:
            return ChatDelta(content=content) if content else _NOTHING
        calls = [
            ToolCallDelta(
                index=piece.index,
                id=UNSET if piece.name is None else collector.calls[piece.index].id,
                type=UNSET if piece.name is None else "function",
                function=FunctionDelta(
                    name=UNSET if piece.name is None else piece.name, arguments=piece.arguments
                ),
            )
            for piece in pieces
        ]
        return ChatDelta(content=content or UNSET, tool_calls=calls)

    def _delta(self, delta: ChoiceDelta, part: ChatDelta) -> ChatChunkChoice:
        reason = delta.finish_reason
        if self._plan is not None:
            called = bool(self._collectors[delta.index].calls)
            reason = self._plan.finish_reason(reason, called=called)
        logprobs = None
        if self._writer is not None and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._writer)
        return ChatChunkChoice(
            index=delta.index,
            delta=part,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=delta.stop_reason if reason is not None else UNSET,
            token_ids=delta.token_ids if self._wants_ids else UNSET,
        )

    def _chunk(self, choice: ChatChunkChoice, prompt: list[int] | UnsetType = UNSET) -> bytes:
        head = self._head
        usage: Usage | UnsetType = self._usage.usage() if self._continuous else UNSET
        chunk = ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[choice],
            usage=usage,
            prompt_token_ids=prompt,
        )
        return event(encode(chunk))
