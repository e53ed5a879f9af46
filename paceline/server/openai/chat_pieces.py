"""One chat answer in pieces that belong to no API yet: what Responses and Messages are made from.

Both turn their body into a chat body, so every field is checked, rendered and run by the same code
as ``/v1/chat/completions``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from paceline.engine.types import TokenLogprobs
from paceline.server.bodies.protocol import ChatRequest
from paceline.server.bodies.tool_calls import Call, CallCollector
from paceline.server.bodies.wire import Usage
from paceline.server.openai.answers import AnswerHead, UsageCount
from paceline.server.openai.chat import start_chat
from paceline.server.service import Service
from paceline.server.tool_formats import CallDelta

__all__ = ["ChatPiece", "chat_pieces"]


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What one delivery adds to the answer of one choice."""

    text: str
    call_deltas: list[CallDelta]
    # all calls so far; a call is complete once the next began or the answer is over
    calls: list[Call]
    logprobs: tuple[TokenLogprobs, ...]
    # chat's finish_reason on the last piece, else None
    finish_reason: str | None
    stop_reason: int | str | None
    usage: Usage


async def chat_pieces(
    service: Service, request: ChatRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[ChatPiece, None]:
    """Pieces as they come, the first one empty as soon as the request is under way (its ``usage``
    has the prompt's length). ``request`` has n = 1.

    Raises what ``Service.run`` raises.
    """
    prompt, outputs = await start_chat(service, request, head, arrival)
    plan = request.template.tools
    collector: CallCollector | None = None
    if plan is not None and plan.calls:
        collector = plan.collector()
    calls: list[Call] = [] if collector is None else collector.calls
    count = UsageCount(1)
    async with aclosing(outputs):
        first = True
        async for _, output in outputs:
            if first:
                first = False
                yield ChatPiece("", [], calls, (), None, None, Usage.of(len(prompt), 0, 0))
            count.update(0, output)
            for delta in output.choices:
                text, deltas = delta.text, list[CallDelta]()
                reason = delta.finish_reason
                if collector is not None:
                    text, deltas = collector.push(delta.text, last=reason is not None)
                if plan is not None:
                    reason = plan.finish_reason(reason, called=bool(calls))
                logprobs = delta.logprobs or ()
                yield ChatPiece(
                    text, deltas, calls, logprobs, reason, delta.stop_reason, count.usage()
                )
