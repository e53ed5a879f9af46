"""One chat in pieces that are independent of an API: the source of chat, Responses and Messages.

Responses and Messages turn their body into a chat body, so that the code of
``/v1/chat/completions`` checks, renders and runs every field.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

from paceline.engine.text.output_processor import resumed_texts
from paceline.engine.types import ChoiceDelta, GenerationOutput, TokenLogprobs
from paceline.http.shortcut import Shortcut
from paceline.server.apis.openai.answers import AnswerHead, UsageCount, prepared
from paceline.server.generation.service import Service
from paceline.server.model_formats.reasoning import Reader
from paceline.server.model_formats.tool_formats import CallDelta, Piece
from paceline.server.protocol.requests import ChatRequest
from paceline.server.protocol.responses import Usage
from paceline.server.protocol.tool_calls import Call

__all__ = ["ChatPiece", "ChatPieces", "Quiet", "StartedChat", "chat_pieces", "start_chat"]

# seconds
_LONG_QUIET: Final = 5.0


class ChatPiece(NamedTuple):
    """The part of one delivery that belongs to one choice."""

    choice: int
    # reasoning, which is not part of the text
    reasoning: str
    # text, and pieces of calls, in order
    parts: list[Piece]
    # all calls so far; a call is complete once the next begins or the answer ends
    calls: list[Call]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    # chat's finish_reason on the last piece, else None
    finish_reason: str | None
    stop_reason: int | str | None
    # counts on: read it before the next delivery
    so_far: UsageCount

    @property
    def text(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def call_deltas(self) -> list[CallDelta]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def usage(self) -> Usage:
        """Tokens up to this piece."""
        return self.so_far.usage()


class Quiet:
    """Measures how long a stream has sent nothing. A call is not sent before it is complete, and
    gateways consider a stream stalled that is silent within a part of its answer."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def begin(self) -> None:
        self._since = time.monotonic()

    @property
    def has_lasted(self) -> bool:
        """Whether an empty part must be sent."""
        return time.monotonic() - self._since > _LONG_QUIET


class StartedChat(NamedTuple):
    """A running chat."""

    # ids of the prompt
    prompt: list[int]
    # deltas as they arrive, except those that a shortcut takes
    outputs: AsyncGenerator[tuple[int, GenerationOutput], None]
    # by choice, text that another engine has delivered
    passed_over: Mapping[int, str]
    # the prompt ends within reasoning
    thinking: bool


class ChatPieces:
    """Turns the deliveries of one request into pieces. Pure.

    Args:
        prompt: its ids.
        thinking: the prompt ends within reasoning.
    """

    def __init__(self, request: ChatRequest, prompt: list[int], *, thinking: bool = False) -> None:
        plan = request.template.tools
        # None: the output cannot hold calls
        self.plan = plan if plan is not None and plan.calls else None
        self.count = UsageCount(1, request.options)
        self.count.expect(0, len(prompt))
        n = request.options.n
        self._tells_reasoning = request.tells_reasoning
        self._thinking = request.thinking
        # one per choice; empty if reasoning is not searched for
        self._readers: list[Reader] = []
        if self._thinking is not None:
            marks = self._thinking.marks
            goes_on = bool(request.template.continued)
            self._readers = [marks.reader(thinking=thinking, goes_on=goes_on) for _ in range(n)]
            self.count.add_reasoning(0)
        held = request.options.sampling.grammar is not None
        self._collectors = (
            [] if self.plan is None else [self.plan.collector(held=held) for _ in range(n)]
        )

    def pass_over(self, texts: Mapping[int, str]) -> None:
        """Read text, with its reasoning and calls, that another engine has delivered."""
        for index, text in texts.items():
            if self._readers:
                _, text = self._readers[index].push(text)
            if self.plan is not None:
                self._collectors[index].push(text, last=False)

    @property
    def parses(self) -> bool:
        """Whether the text is searched for reasoning or calls."""
        return bool(self._readers or self.plan)

    def calls(self, index: int) -> list[Call]:
        """Return all calls so far of one choice; the list grows."""
        return self._collectors[index].calls if self._collectors else []

    def first(self) -> ChatPiece:
        """Return an empty piece for a running request."""
        return ChatPiece(0, "", [], self.calls(0), (), (), None, None, self.count)

    def read(self, output: GenerationOutput) -> list[ChatPiece]:
        self.count.update(0, output)
        return [self._piece(delta) for delta in output.choices]

    def _piece(self, delta: ChoiceDelta) -> ChatPiece:
        index, text, reason = delta.index, delta.text, delta.finish_reason
        calls: list[Call] = []
        thoughts = ""
        if self._readers:
            thoughts, text = self._read_thoughts(delta)
        parts: list[Piece] = [text] if text else []
        if self.plan is not None:
            collector = self._collectors[index]
            calls = collector.calls
            parts = collector.push(text, last=reason is not None)
            reason = self.plan.finish_reason(reason, called=bool(calls))
        return ChatPiece(
            index,
            thoughts,
            parts,
            calls,
            delta.token_ids,
            delta.logprobs or (),
            reason,
            delta.stop_reason,
            self.count,
        )

    def _read_thoughts(self, delta: ChoiceDelta) -> tuple[str, str]:
        """Return reasoning for the caller, and the rest."""
        reader = self._readers[delta.index]
        had_ended = reader.ended
        thoughts, text = reader.push(delta.text)
        if delta.finish_reason is not None:
            last = reader.finish()
            thoughts, text = thoughts + last.thoughts, text + last.text
        assert self._thinking is not None, "there are readers"
        if reader.thinking:
            self.count.add_reasoning(len(delta.token_ids))
        elif reader.ended and not had_ended:
            self.count.add_reasoning(self._thinking.count(delta.token_ids))
        return thoughts if self._tells_reasoning else "", text


async def chat_pieces(
    service: Service, request: ChatRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[ChatPiece, None]:
    """Yield pieces as they arrive, the first one empty as soon as the request runs (its ``usage``
    has the prompt's length). ``request`` has n = 1.

    Raises what ``Service.run`` raises.
    """
    chat = await start_chat(service, request, head, arrival)
    pieces = ChatPieces(request, chat.prompt, thinking=chat.thinking)
    pieces.pass_over(chat.passed_over)
    async with aclosing(chat.outputs):
        begun = False
        async for _, output in chat.outputs:
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
    """Render the prompt and start the request. ``shortcut`` may take some of the deltas.

    Raises what ``Service.run`` raises, and InvalidRequestError.
    """
    options = request.options
    rendered = await service.prompts.chat(
        request.template, add_special_tokens=options.add_special_tokens
    )
    default = service.rules.default_sampling.get("max_new_tokens")
    most = None if default is None else int(default)
    asked = await prepared(service, head.engine_id(0), rendered, options, arrival, most)
    prompt = asked.prompt_token_ids
    passed_over: Mapping[int, str] = {}
    if options.resume_output_ids and (request.template.tools or request.thinking):
        passed_over = resumed_texts(asked, service.client.tokenizer)
    template = request.template
    thinking = request.thinking is not None and request.thinking.left_open(
        prompt,
        service.client.tokenizer,
        continued=template.continued,
        answers=template.add_generation_prompt or template.continue_final_message,
    )
    return StartedChat(prompt, service.run((asked,), shortcut), passed_over, thinking)
