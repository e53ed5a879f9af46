"""Ollama's API: ``/api/chat``, ``/api/generate``, and endpoints about models.

Answers stream as lines of JSON unless ``stream`` is false; the last line has the counts and times,
in nanoseconds. Bodies become those of chat and completions (``protocol``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from paceline.engine.types import GenerationOutput
from paceline.http.shortcut import Shortcut
from paceline.server.apis.anthropic import object_of
from paceline.server.apis.ollama.protocol import OllamaRequest, ShowBody, served_name
from paceline.server.apis.openai.answers import AnswerHead, prepared
from paceline.server.apis.openai.chat_deltas import chat_pieces
from paceline.server.generation.service import Service
from paceline.server.protocol.field_types import check_model
from paceline.server.protocol.requests import ChatRequest, CompletionRequest
from paceline.server.protocol.responses import encode
from paceline.server.protocol.tool_calls import Call

__all__ = [
    "ollama_answer",
    "ollama_lines",
    "running_models",
    "served_models",
    "shown_model",
]

_NS: Final = 1e9


class _News(NamedTuple):
    """The additions of one delivery."""

    thoughts: str
    text: str
    # all calls of the answer, with its last piece
    calls: list[Call]
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str | None


async def ollama_lines(
    service: Service,
    request: OllamaRequest,
    request_id: str,
    arrival: float,
    _: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a streamed answer."""
    async for value in _values(service, request, request_id, arrival):
        yield encode(value) + b"\n"


async def ollama_answer(
    service: Service, request: OllamaRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer that is not streamed: all lines as one."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    last: dict[str, Any] = {}
    async for last in _values(service, request, request_id, arrival):
        said = last.get("message")
        thoughts.append((last if said is None else said).get("thinking", ""))
        texts.append(last["response"] if said is None else said["content"])
        calls += [] if said is None else said.get("tool_calls", [])
    text = "".join(texts)
    if "message" in last:
        last["message"]["content"] = text
        if calls:
            last["message"]["tool_calls"] = calls
    else:
        last["response"] = text
    if thought := "".join(thoughts):
        last.get("message", last)["thinking"] = thought
    return encode(last)


async def _values(
    service: Service, request: OllamaRequest, request_id: str, arrival: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the lines of an answer, not encoded yet."""
    is_chat = request.is_chat

    def line(text: str, **more: Any) -> dict[str, Any]:
        value: dict[str, Any] = {"model": request.model, "created_at": _now()}
        if is_chat:
            return value | {"message": {"role": "assistant", "content": text}} | more
        return value | {"response": text} | more

    if request.nothing:
        yield line("", done=True, done_reason=request.nothing)
        return
    head = AnswerHead.of("ollama", request_id, service)
    first: float | None = None
    async with aclosing(_news(service, request, head, arrival)) as news:
        async for thoughts, text, calls, num_prompt, num_output, reason in news:
            if num_output and first is None:
                first = time.monotonic()
            if thoughts:
                value = line("", done=False)
                (value["message"] if is_chat else value)["thinking"] = thoughts
                yield value
            if text:
                yield line(text, done=False)
            if calls and is_chat:
                value = line("", done=False)
                value["message"]["tool_calls"] = [_call(call) for call in calls]
                yield value
            if reason is not None:
                ended = time.monotonic()
                begun = ended if first is None else first
                yield line(
                    "",
                    done=True,
                    done_reason="length" if reason == "length" else "stop",
                    total_duration=round(_NS * (ended - arrival)),
                    # the model was loaded before the request arrived
                    load_duration=0,
                    prompt_eval_count=num_prompt,
                    prompt_eval_duration=round(_NS * (begun - arrival)),
                    eval_count=num_output,
                    eval_duration=round(_NS * (ended - begun)),
                )


async def _news(
    service: Service, request: OllamaRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[_News, None]:
    asked = request.asked
    assert asked is not None, "a request with nothing to do is answered at once"
    if isinstance(asked, ChatRequest):
        async with aclosing(chat_pieces(service, asked, head, arrival)) as pieces:
            async for piece in pieces:
                is_last, usage = piece.finish_reason is not None, piece.usage
                yield _News(
                    piece.reasoning,
                    piece.text,
                    piece.calls if is_last else [],
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    piece.finish_reason,
                )
        return
    outputs = await _start_raw(service, asked, head, arrival)
    async with aclosing(outputs):
        async for _, output in outputs:
            (delta,) = output.choices or (None,)
            yield _News(
                "",
                "" if delta is None else delta.text,
                [],
                output.num_prompt_tokens,
                output.num_output_tokens,
                None if delta is None else delta.finish_reason,
            )


async def _start_raw(
    service: Service, request: CompletionRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    (prompt,) = await service.prompts.completion(request)
    asked = await prepared(service, head.engine_id(0), prompt, request.options, arrival, None)
    return service.run((asked,))


def _call(call: Call) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": object_of(call.arguments)}}


def _now() -> str:
    return rfc3339(time.time())


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# ---------------------------------------------------------------------------- models


def _details(service: Service) -> dict[str, Any]:
    return {"quantization_level": service.client.info.dtype}


def served_models(service: Service) -> dict[str, Any]:
    """Return the answer to ``/api/tags``."""
    at = rfc3339(service.created)
    return {
        "models": [
            {"name": name, "model": name, "modified_at": at, "details": _details(service)}
            for name in service.rules.listed_models
        ]
    }


def running_models(service: Service) -> dict[str, Any]:
    """Return the answer to ``/api/ps``: the served model is always loaded."""
    name = service.model_name
    length = service.rules.max_model_len
    model = {"name": name, "model": name, "details": _details(service), "context_length": length}
    return {"models": [model]}


def shown_model(service: Service, asked: ShowBody) -> dict[str, Any]:
    """Return the answer to ``/api/show``. Raises InvalidRequestError or UnknownModelError."""
    name = asked.model or asked.name or service.model_name
    check_model(served_name(name, service.rules), service.rules)
    info = service.client.info
    template = service.client.tokenizer.chat_template_source
    return {
        "modified_at": rfc3339(service.created),
        "template": template or "",
        "details": _details(service),
        "model_info": {
            "general.basename": info.model,
            "paceline.context_length": service.rules.max_model_len,
            "paceline.vocab_size": info.vocab_size,
        },
        "capabilities": ["embedding"]
        if info.pooling is not None
        else [
            "completion",
            *(["tools"] if template and "tools" in template else []),
            *(["thinking"] if service.rules.thinking is not None else []),
        ],
    }
