"""``POST /v1/chat/completions``, from the parsed request to the bytes of the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paceline.engine.protocol import Tokenizer
from paceline.engine.types import GenerationOutput, TokenLogprobs
from paceline.http.shortcut import Shortcut
from paceline.server.apis.openai.answers import AnswerHead, Choice, Chunks, PlainEvents
from paceline.server.apis.openai.chat_deltas import ChatPiece, ChatPieces, StartedChat, start_chat
from paceline.server.apis.openai.logprobs import TokenWriter, chat_logprobs, prompt_logprobs_json
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import ChatRequest
from paceline.server.protocol.responses import (
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
    encode,
)

__all__ = ["ChatStream", "chat_answer", "chat_events"]

# every chunk has a delta with content, also without new text
_NOTHING = ChatDelta(content="")


async def chat_events(
    service: Service,
    request: ChatRequest,
    request_id: str,
    arrival: float,
    shortcut: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer; the last one is ``DONE``.

    Errors before the first event are raised from the first ``anext``.
    """
    head = AnswerHead.of("chatcmpl", request_id, service, request.options)
    chat = await start_chat(service, request, head, arrival, shortcut)
    stream = ChatStream(head, request, chat, service.client.tokenizer)
    shortcut.render_with(stream.middle)
    async with aclosing(chat.outputs):
        async for _, output in chat.outputs:
            data = stream.events(output)
            if data:
                yield data
    yield stream.end()


async def chat_answer(
    service: Service, request: ChatRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer that is not streamed."""
    head = AnswerHead.of("chatcmpl", request_id, service, request.options)
    chat = await start_chat(service, request, head, arrival)
    prompt, options = chat.prompt, request.options
    pieces = ChatPieces(request, prompt, thinking=chat.thinking)
    choices = [Choice() for _ in range(options.n)]
    thoughts = [""] * options.n
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    async with aclosing(chat.outputs):
        async for _, output in chat.outputs:
            if output.prompt_logprobs is not None:
                prompt_logprobs = output.prompt_logprobs
            for piece in pieces.read(output):
                choices[piece.choice].add(piece)
                thoughts[piece.choice] += piece.reasoning
    writer = _writer(request, service.client.tokenizer)
    answered = [
        _choice(i, choice, thoughts[i], request, pieces, writer) for i, choice in enumerate(choices)
    ]
    return encode(
        ChatAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            service_tier=head.service_tier,
            system_fingerprint=head.fingerprint,
            choices=answered,
            usage=pieces.count.usage(),
            prompt_logprobs=prompt_logprobs_json(prompt, prompt_logprobs, writer),
            prompt_token_ids=prompt if options.return_token_ids else None,
            metrics=pieces.count.metrics(),
            timings=pieces.count.timings(),
        )
    )


def _writer(request: ChatRequest, tokenizer: Tokenizer) -> TokenWriter:
    return TokenWriter(tokenizer, as_ids=request.options.return_tokens_as_token_ids)


def _choice(
    index: int,
    choice: Choice,
    thoughts: str,
    request: ChatRequest,
    pieces: ChatPieces,
    writer: TokenWriter,
) -> ChatChoice:
    options = request.options
    wanted = options.sampling.logprobs is not None
    content: str | None = request.echo + "".join(choice.text)
    calls = tuple(
        ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))
        for call in pieces.calls(index)
    )
    if not content and (calls or (pieces.plan is not None and pieces.plan.forced)):
        content = None
    return ChatChoice(
        index=index,
        message=ChatMessage(
            role=request.template.speaker,
            content=content,
            reasoning=thoughts or None,
            reasoning_content=thoughts or UNSET,
            tool_calls=calls,
        ),
        logprobs=chat_logprobs(choice.logprobs, writer) if wanted else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if options.return_token_ids else None,
    )


class ChatStream:
    """Turns deltas into events. Pure: bytes out, nothing sent.

    Args:
        chat: the started chat.
    """

    def __init__(
        self,
        head: AnswerHead,
        request: ChatRequest,
        chat: StartedChat,
        tokenizer: Tokenizer,
    ) -> None:
        self._request = request
        self._prompt = chat.prompt
        self._pieces = pieces = ChatPieces(request, chat.prompt, thinking=chat.thinking)
        pieces.pass_over(chat.passed_over)
        self._chunks = Chunks(ChatChunk, head, request.options, tokenizer, pieces.count)
        self._begun = False
        # without parsing, a middle delta holds only text, and ids if requested
        self._plain = self._chunks.plain and not pieces.parses
        self._middle = PlainEvents("content", self._chunks.wants_ids)
        self.end = self._chunks.end

    def events(self, output: GenerationOutput) -> bytes:
        """Return the events of one delivery, preceded by the role chunks if it is the first one.

        Empty when there is nothing to send yet, such as half a character.
        """
        pieces = self._pieces.read(output)
        data = b""
        if not self._begun:
            self._begun = True
            data = self._begin()
        for piece in pieces:
            delta = _delta(piece)
            if delta is not _NOTHING or piece.finish_reason or self._chunks.tells(piece.token_ids):
                data += self._chunks.event(self._chunk_choice(piece, delta))
        return data

    def middle(self, output: GenerationOutput) -> bytes:
        """Return ``events`` of a delivery that is not the first and ends no choice."""
        if not self._plain:
            return self.events(output)
        return self._middle.of(output, self._example)

    def _example(self, index: int) -> bytes:
        """Return a chunk that adds an empty text to a choice."""
        token_ids = () if self._chunks.wants_ids else UNSET
        return self._chunks.event(ChatChunkChoice(index=index, delta=_NOTHING, token_ids=token_ids))

    def _begin(self) -> bytes:
        data = b""
        delta = ChatDelta(role=self._request.template.speaker, content=self._request.echo)
        for index in range(self._request.options.n):
            prompt = self._prompt if self._chunks.wants_ids and index == 0 else UNSET
            choice = ChatChunkChoice(index=index, delta=delta)
            data += self._chunks.event(choice, prompt_token_ids=prompt)
        return data

    def _chunk_choice(self, piece: ChatPiece, delta: ChatDelta) -> ChatChunkChoice:
        logprobs = None
        if self._chunks.writer is not None and piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs, self._chunks.writer)
        return ChatChunkChoice(
            index=piece.choice,
            delta=delta,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason is not None else UNSET,
            token_ids=piece.token_ids if self._chunks.wants_ids else UNSET,
        )


def _delta(piece: ChatPiece) -> ChatDelta:
    """Return what a piece adds to the message; ``_NOTHING`` if nothing."""
    thoughts, content = piece.reasoning or UNSET, piece.text or UNSET
    deltas = piece.call_deltas
    if not deltas:
        if thoughts is UNSET and content is UNSET:
            return _NOTHING
        return ChatDelta(reasoning=thoughts, reasoning_content=thoughts, content=content)
    calls = [
        ToolCallDelta(
            index=part.index,
            id=UNSET if part.name is None else piece.calls[part.index].id,
            type=UNSET if part.name is None else "function",
            function=FunctionDelta(
                name=UNSET if part.name is None else part.name, arguments=part.arguments
            ),
        )
        for part in deltas
    ]
    return ChatDelta(
        reasoning=thoughts,
        reasoning_content=thoughts,
        content=content,
        tool_calls=calls,
    )
