"""``/v1/messages`` and its ``count_tokens``: Anthropic's shapes over the chat machinery."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import Fields, show
from paceline.server.bodies.protocol import ChatRequest, RequestRules, parse_chat
from paceline.server.bodies.wire import Usage, encode
from paceline.server.openai.answers import AnswerHead
from paceline.server.openai.chat_pieces import chat_pieces
from paceline.server.service import Service

__all__ = [
    "NO_EFFECT",
    "REFUSED",
    "count_tokens",
    "messages_answer",
    "messages_events",
    "object_of",
    "parse_messages_api",
]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# passed on under the same name
_SAME: Final = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "slo",
    "priority",
    "cache_salt",
    "explain",
)
NO_EFFECT: Final = (
    "service_tier", "inference_geo", "cache_control", "betas", "speed", "user_profile_id",
)  # fmt: skip
REFUSED: Final = ("container", "context_management", "diagnostics", "mcp_servers")
_THINKING: Final = ("disabled", "enabled", "adaptive")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages_api(body: dict[str, Any], rules: RequestRules, tenant: str = "") -> ChatRequest:
    """Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(body)
    chat = _chat_body(fields)
    ignored = _thinking(fields, chat, rules)
    if fields.raw("max_tokens") is None:
        raise InvalidRequestError("max_tokens is missing", "max_tokens")
    chat["max_tokens"] = fields.raw("max_tokens")
    # clients send the most that a model could say, whatever the conversation's length
    request = parse_chat(_finish(fields, chat), rules, tenant, cuts_max_tokens=True)
    return replace(request, options=replace(request.options, ignored_fields=ignored))


def _chat_body(fields: Fields) -> dict[str, Any]:
    """What decides about the prompt, as a chat body."""
    chat: dict[str, Any] = {}
    for name in _SAME:
        value = fields.raw(name)
        if value is not None:
            chat[name] = value
    values = fields.array("messages")
    if values is None:
        raise InvalidRequestError("messages is missing", "messages")
    messages: list[dict[str, Any]] = []
    system = fields.raw("system")
    if system is not None:
        messages.append({"role": "system", "content": _texts(system, "system")})
    for index, value in enumerate(values):
        messages += _messages(value, f"messages[{index}]")
    chat["messages"] = messages
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        # Anthropic's way to begin the answer
        chat["continue_final_message"] = True
    tools = fields.array("tools") or []
    if tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = fields.object("tool_choice")
    if choice is not None:
        chat |= _tool_choice(choice)
    return chat


def _thinking(fields: Fields, chat: dict[str, Any], rules: RequestRules) -> tuple[str, ...]:
    """Turns the chat template's thinking on or off; off where nothing is said, as Anthropic has it.

    Returns the names of what has no effect. Raises InvalidRequestError where the model cannot.
    """
    thinking = fields.object("thinking") or {"type": "disabled"}
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise InvalidRequestError(
            f"thinking.type must be one of {', '.join(_THINKING)}, got {show(kind)}", "thinking"
        )
    if rules.thinking is not None and rules.thinking.switchable:
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    elif kind != "disabled" and rules.thinking is None:
        raise InvalidRequestError(
            f"thinking.type={show(kind)} is not served: this model's chat template has no "
            "thinking; it may be 'disabled'",
            "thinking",
        )
    # thoughts count against max_tokens alone
    return ("thinking.budget_tokens",) if "budget_tokens" in thinking else ()


def _finish(fields: Fields, chat: dict[str, Any]) -> dict[str, Any]:
    stops = fields.raw("stop_sequences")
    if stops is not None:
        chat["stop"] = stops
    output = fields.object("output_config") or {}
    wanted = output.get("format")
    if wanted is not None:
        if type(wanted) is not dict or wanted.get("type") != "json_schema":
            raise InvalidRequestError(
                "output_config.format must be an object of type 'json_schema'", "output_config"
            )
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": wanted.get("schema")},
        }
    # the tenant was made from it
    Fields(fields.object("metadata") or {}).string("user_id")
    for name in REFUSED:
        if fields.raw(name) is not None:
            raise InvalidRequestError(f"{name} is not served in /v1/messages", name)
    for name in NO_EFFECT:
        fields.raw(name)
    unknown = [name for name in fields.unknown() if name != "'output_config'"]
    if unknown:
        raise InvalidRequestError(f"{', '.join(unknown)}: not served in /v1/messages")
    return chat


def _texts(value: Any, where: str) -> str:
    """A string, or text blocks joined."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise InvalidRequestError(
            f"{where} must be a string or a list of blocks, got {show(value)}", where.split("[")[0]
        )
    return "\n".join(_text(block, f"{where}[{i}]") for i, block in enumerate(value))


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if type(block) is dict else None
    text = block.get("text") if kind == "text" else None
    if type(text) is not str:
        raise InvalidRequestError(
            f"{where} must be a block of type 'text' with a text, got type {show(kind)}",
            where.split("[")[0],
        )
    return text


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """One of Anthropic's messages; tool results in it become messages of their own."""
    role = value.get("role") if type(value) is dict else None
    if role not in ("user", "assistant"):
        raise InvalidRequestError(
            f"{where}.role must be user or assistant, got {show(role)}", "messages"
        )
    content = value.get("content")
    if type(content) is not list:
        return [{"role": role, "content": _texts(content, f"{where}.content")}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if type(block) is dict else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            said = _texts(block.get("content", ""), f"{at}.content")
            results.append(
                {"role": "tool", "content": said, "tool_call_id": block.get("tool_use_id")}
            )
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            # of an earlier turn; not shown again
            continue
        else:
            texts.append(_text(block, at))
    if calls:
        return [{"role": role, "content": "\n".join(texts), "tool_calls": calls}]
    if texts or not results:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if type(tool) is not dict or tool.get("type", "custom") != "custom":
        kind = tool.get("type") if type(tool) is dict else tool
        raise InvalidRequestError(
            f"{where} must be a tool of the caller's own, got {show(kind)}", "tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    chat: dict[str, Any] = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")}
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif type(kind) is str and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool or none, got {show(kind)}", "tool_choice"
        )
    return chat


async def count_tokens(service: Service, body: dict[str, Any]) -> bytes:
    """The answer to ``/v1/messages/count_tokens``."""
    fields = Fields(body)
    chat = _chat_body(fields)
    _thinking(fields, chat, service.rules)
    request = parse_chat(_finish(fields, chat), service.rules)
    prompt = await service.prompts.chat(
        request.template, add_special_tokens=request.options.add_special_tokens
    )
    return encode({"input_tokens": len(prompt)})


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        **usage.explanation(),
    }


def _stop(finish: str | None, stop: int | str | None, *, called: bool) -> dict[str, Any]:
    if called and finish == "stop":
        finish = "tool_calls"
    if finish == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(finish or "", finish), "stop_sequence": None}


async def messages_answer(
    service: Service, request: ChatRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer that is not streamed."""
    head = AnswerHead.of("msg", request_id, service)
    thoughts: list[str] = []
    text: list[str] = []
    last = None
    async with aclosing(chat_pieces(service, request, head, arrival)) as pieces:
        async for piece in pieces:
            thoughts.append(piece.reasoning)
            text.append(piece.text)
            last = piece
    assert last is not None, "an answer has a last piece"
    said = "".join(text)
    content: list[dict[str, Any]] = []
    if thought := "".join(thoughts):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said or not last.calls:
        content.append({"type": "text", "text": said})
    for call in last.calls:
        content.append(
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": object_of(call.arguments),
            }
        )
    return encode(
        _message(head)
        | {"content": content, "usage": _usage(last.usage)}
        | _stop(last.finish_reason, last.stop_reason, called=bool(last.calls))
    )


def _message(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def object_of(arguments: str) -> Any:
    """Arguments as the object they are; what was cut off by a limit is an empty one."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


async def messages_events(
    service: Service, request: ChatRequest, request_id: str, arrival: float
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer, from ``message_start`` to ``message_stop``."""
    head = AnswerHead.of("msg", request_id, service)
    # the content block that is open: None, "thoughts", "text" or the number of a call
    block: str | int | None = None
    index = -1
    started = False
    start: dict[str, Any]
    async with aclosing(chat_pieces(service, request, head, arrival)) as pieces:
        async for piece in pieces:
            data = b""
            if not started:
                started = True
                message = _message(head) | {"usage": _usage(piece.usage)}
                data = _event("message_start", message=message) + _event("ping")
            if piece.reasoning:
                if block != "thoughts":
                    data += b"" if block is None else _event("content_block_stop", index=index)
                    block, index = "thoughts", index + 1
                    start = {"type": "thinking", "thinking": "", "signature": ""}
                    data += _event("content_block_start", index=index, content_block=start)
                delta = {"type": "thinking_delta", "thinking": piece.reasoning}
                data += _event("content_block_delta", index=index, delta=delta)
            if piece.text:
                if block != "text":
                    data += b"" if block is None else _event("content_block_stop", index=index)
                    block, index = "text", index + 1
                    start = {"type": "text", "text": ""}
                    data += _event("content_block_start", index=index, content_block=start)
                delta = {"type": "text_delta", "text": piece.text}
                data += _event("content_block_delta", index=index, delta=delta)
            for part in piece.call_deltas:
                if block != part.index:
                    data += b"" if block is None else _event("content_block_stop", index=index)
                    block, index = part.index, index + 1
                    call = piece.calls[part.index]
                    start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                    data += _event("content_block_start", index=index, content_block=start)
                if part.arguments:
                    delta = {"type": "input_json_delta", "partial_json": part.arguments}
                    data += _event("content_block_delta", index=index, delta=delta)
            if piece.finish_reason is not None:
                data += b"" if block is None else _event("content_block_stop", index=index)
                stop = _stop(piece.finish_reason, piece.stop_reason, called=bool(piece.calls))
                data += _event("message_delta", delta=stop, usage=_usage(piece.usage))
                data += _event("message_stop")
            if data:
                yield data
