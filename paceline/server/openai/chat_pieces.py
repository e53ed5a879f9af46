"""One chat in pieces that belong to no API yet: what chat, Responses and Messages are made from.

Responses and Messages turn their body into a chat body, so every field is checked, rendered and run
by the same code as ``/v1/chat/completions``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import NamedTuple

from paceline.engine.text.output_processor import resumed_texts
from paceline.engine.types import ChoiceDelta, GenerationOutput, TokenLogprobs
from paceline.http.shortcut import Shortcut
from paceline.server.bodies.protocol import ChatRequest
from paceline.server.bodies.tool_calls import Call
from paceline.server.bodies.wire import Usage
from paceline.server.openai.answers import AnswerHead, UsageCount, generation_request
from paceline.server.prompts import sampling_for, truncated
from paceline.server.service import Service
from paceline.server.tool_formats import CallDelta

__all__ = ["ChatPiece", "ChatPieces", "chat_pieces", "start_chat"]


class ChatPiece(NamedTuple):
    """What one delivery adds to the answer of one choice."""

    choice: int
    text: str
    # of calls, which are in no text
    call_deltas: list[CallDelta]
    # all calls so far; a call is complete once the next began or the answer is over
    calls: list[Call]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    # chat's finish_reason on the last piece, else None
    finish_reason: str | None
    stop_reason: int | str | None
    # goes on counting: read it before the next delivery
    so_far: UsageCount

    @property
    def usage(self) -> Usage:
        """Tokens up to this piece."""
        return self.so_far.usage()


class StartedChat(NamedTuple):
    """A chat under way."""

    # ids of the prompt
    prompt: list[int]
    # deltas as they come, less what a shortcut takes
    outputs: AsyncGenerator[tuple[int, GenerationOutput], None]
    # by choice, text that another engine has delivered
    passed_over: Mapping[int, str]


class ChatPieces:
    """Turns the deliveries of one request into pieces. Pure.

    Args:
        prompt: its ids.
    """

    def __init__(self, request: ChatRequest, prompt: list[int]) -> None:
        plan = request.template.tools
        # where calls may come
        self.plan = plan if plan is not None and plan.calls else None
        self.count = UsageCount.of(1, request.options)
        self.count.expect(0, len(prompt))
        n = request.options.n
        self._collectors = [] if self.plan is None else [self.plan.collector() for _ in range(n)]

    def pass_over(self, texts: Mapping[int, str]) -> None:
        """Take in text of choices that another engine has delivered, calls in it too."""
        if self.plan is not None:
            for index, text in texts.items():
                self._collectors[index].push(text, last=False)

    def calls(self, index: int) -> list[Call]:
        """All calls so far of one choice; the list grows."""
        return self._collectors[index].calls if self._collectors else []

    def first(self) -> ChatPiece:
        """A piece that adds nothing, of a request that is under way."""
        return ChatPiece(0, "", [], self.calls(0), (), (), None, None, self.count)

    def read(self, output: GenerationOutput) -> list[ChatPiece]:
        self.count.update(0, output)
        return [self._piece(delta) for delta in output.choices]

    def _piece(self, delta: ChoiceDelta) -> ChatPiece:
        index, text, reason = delta.index, delta.text, delta.finish_reason
        deltas: list[CallDelta] = []
        calls: list[Call] = []
        if self.plan is not None:
            collector = self._collectors[index]
            calls = collector.calls
            text, deltas = collector.push(text, last=reason is not None)
            reason = self.plan.finish_reason(reason, called=bool(calls))
        return ChatPiece(
            index,
            text,
            deltas,
            calls,
            delta.token_ids,
            delta.logprobs or (),
            reason,
            delta.stop_reason,
            self.count,
        )


async def chat_pieces(
    service: Service, request: ChatRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[ChatPiece, None]:
    """Pieces as they come, the first one empty as soon as the request is under way (its ``usage``
    has the prompt's length). ``request`` has n = 1.

    Raises what ``Service.run`` raises.
    """
    prompt, outputs, passed_over = await start_chat(service, request, head, arrival)
    pieces = ChatPieces(request, prompt)
    pieces.pass_over(passed_over)
    async with aclosing(outputs):
        begun = False
        async for _, output in outputs:
            if not begun:
                begun = True
                yield pieces.first()
            for piece in pieces.read(output):
                yield piece


async def start_chat(
    service: Service,
    request: ChatRequest,
    head: AnswerHead,
    arrival: float,
    shortcut: Shortcut[GenerationOutput] | None = None,
) -> StartedChat:
    """Renders the prompt and begins. ``shortcut`` may take some of the deltas.

    Raises what ``Service.run`` raises, and InvalidRequestError.
    """
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
    passed_over: Mapping[int, str] = {}
    if options.resume_output_ids and request.template.tools is not None:
        passed_over = resumed_texts(engine_request, service.client.tokenizer)
    return StartedChat(prompt, service.run((engine_request,), shortcut), passed_over)
