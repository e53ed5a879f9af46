"""``/v1/messages`` and its ``count_tokens``: Anthropic's formats on top of chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.apis.openai.answers import AnswerHead
from paceline.server.apis.openai.chat_deltas import ChatPiece, Quiet, chat_pieces
from paceline.server.generation.service import Service
from paceline.server.model_formats.tool_formats import CallDelta
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    INT32,
    anything,
    array,
    ignored,
    mapping,
    needed,
    nested,
    refused,
    string,
    unread,
    unread_each,
)
from paceline.server.protocol.generation import ChatBody
from paceline.server.protocol.requests import ChatRequest, RequestRules, parse_chat
from paceline.server.protocol.responses import Usage, encode
from paceline.server.protocol.tool_calls import TOOL_NAME, Call

__all__ = [
    "CountTokensBody",
    "MessagesBody",
    "count_tokens",
    "messages_answer",
    "messages_events",
    "object_of",
    "parse_messages_api",
]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THINKING: Final = ("disabled", "enabled", "adaptive")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_BLOCK: Final = schemas.record(
    {"type": schemas.string("text", "tool_use", "tool_result", "thinking", "redacted_thinking")}
)
_MESSAGES: Final = schemas.array(
    schemas.record(
        {
            "role": schemas.string("user", "assistant"),
            "content": {"anyOf": [schemas.STRING, schemas.array(_BLOCK)]},
        }
    ),
    1,
)
_TEXTS: Final = {
    "anyOf": [
        schemas.STRING,
        schemas.array(schemas.record({"type": schemas.string("text"), "text": schemas.STRING})),
    ]
}
_TOOL: Final = schemas.record(
    {"name": TOOL_NAME},
    {
        "description": schemas.nullable(schemas.STRING),
        "input_schema": schemas.nullable(schemas.OBJECT),
        "type": schemas.string("custom"),
    },
)
_CHOICE: Final = schemas.record(
    {"type": schemas.string("auto", "any", "tool", "none")},
    {"name": schemas.STRING, "disable_parallel_tool_use": schemas.nullable(schemas.BOOLEAN)},
)
_FORMAT: Final = schemas.record(
    {"type": schemas.string("json_schema"), "schema": {"type": ["object", "boolean"]}}
)
_UNSERVED: Final = refused(" is not served in /v1/messages", ())


_MESSAGE_NAMES: Final = frozenset({"role", "content"})
_TOOL_NAMES: Final = frozenset({"type", "name", "description", "input_schema", "cache_control"})
# name and description of a schema inform the caller; a schema is always enforced strictly
_FORMAT_NAMES: Final = frozenset({"type", "schema", "name", "description", "strict"})
# keys of blocks; reasoning of earlier turns is not shown again, and prefixes are always cached
_BLOCK_NAMES: Final = frozenset(
    {"type", "text", "id", "name", "input", "tool_use_id", "content", "cache_control"}
    | {"thinking", "signature", "data"}
)


class Metadata(Body):
    # it names the tenant
    user_id = string()


def _unread_output(value: dict[str, Any]) -> list[str]:
    wanted = value.get("format")
    inside = unread(wanted, _FORMAT_NAMES, ".format") if type(wanted) is dict else []
    return unread(value, ("format",)) + inside


def _unread_messages(values: list[Any]) -> Iterator[str]:
    for place, value in enumerate(values):
        if type(value) is not dict:
            continue
        yield from unread(value, _MESSAGE_NAMES, f"[{place}]")
        yield from unread_each(value.get("content"), _BLOCK_NAMES, f"[{place}].content")


class CountTokensBody(
    Body,
    passes=(
        ChatBody,
        (
            "model", "temperature", "top_p", "top_k", "stream", "slo", "priority", "cache_salt",
            "explain",
        ),
    ),
    refuses_unknown="{names}: not served in /v1/messages",
):  # fmt: skip
    """``/v1/messages/count_tokens``."""

    messages = replace(
        needed(
            array(_MESSAGES),
            note="text, tool_use and tool_result blocks; a last assistant message is continued",
        ),
        unread=_unread_messages,
    )
    system = replace(anything(_TEXTS), unread=partial(unread_each, names=_BLOCK_NAMES))
    stop_sequences = anything(schemas.array(schemas.string(low=1, high=1024), 0, 16))
    tools = replace(
        array(schemas.array(_TOOL, 0, 128), note="the caller's own"),
        unread=partial(unread_each, names=_TOOL_NAMES),
    )
    tool_choice = mapping(_CHOICE, names=("type", "name", "disable_parallel_tool_use"))
    output_config = replace(
        mapping(schemas.record({}, {"format": schemas.nullable(_FORMAT)}), note="`format`"),
        unread=_unread_output,
    )
    thinking = mapping(
        schemas.record({"type": schemas.string(*_THINKING)}, {"budget_tokens": schemas.ANYTHING}),
        names=("type",),
        note="where the model thinks; absent: `disabled`. The header `x-paceline-ignored-fields` "
        "names `thinking.budget_tokens`: thoughts count against `max_tokens` alone",
    )
    metadata = nested(
        Metadata,
        note="`user_id` is the tenant, where neither a key nor a header says who asks",
        prefixed=False,
    )
    service_tier = inference_geo = cache_control = betas = speed = user_profile_id = ignored()
    container = context_management = diagnostics = mcp_servers = _UNSERVED


class MessagesBody(CountTokensBody):
    """``/v1/messages``."""

    max_tokens = needed(
        anything(schemas.integer(1, INT32)), note="no more than the context has left"
    )


def parse_messages_api(body: dict[str, Any], rules: RequestRules, tenant: str = "") -> ChatRequest:
    """Parse a Messages body. Raises InvalidRequestError or UnknownModelError."""
    asked = MessagesBody.read(body, rules)
    chat = _chat_body(asked, rules)
    chat["max_tokens"] = asked.max_tokens
    # clients send the model's maximum output, without regard to the conversation's length
    request = parse_chat(chat, rules, tenant, cuts_max_tokens=True)
    return replace(request, options=replace(request.options, ignored_fields=asked.ignored_fields))


def _chat_body(asked: CountTokensBody, rules: RequestRules) -> dict[str, Any]:
    """Return a chat body without ``max_tokens``."""
    chat = asked.passed()
    messages: list[dict[str, Any]] = []
    if asked.system is not None:
        messages.append({"role": "system", "content": _texts(asked.system, "system")})
    for index, value in enumerate(asked.messages):
        messages += _messages(value, f"messages[{index}]")
    chat["messages"] = messages
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        # Anthropic's way to give the start of the answer
        chat["continue_final_message"] = True
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        chat |= _tool_choice(asked.tool_choice)
    if asked.stop_sequences is not None:
        chat["stop"] = asked.stop_sequences
    wanted = (asked.output_config or {}).get("format")
    if wanted is not None:
        if type(wanted) is not dict or wanted.get("type") != "json_schema":
            raise InvalidRequestError(
                "output_config.format must be an object of type 'json_schema'", "output_config"
            )
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": wanted.get("schema")},
        }
    _think(asked.thinking or {"type": "disabled"}, chat, rules)
    return chat


def _think(thinking: dict[str, Any], chat: dict[str, Any], rules: RequestRules) -> None:
    """Turn the chat template's thinking on or off; off by default, as in Anthropic's API.

    Raises InvalidRequestError if the model cannot.
    """
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


def _texts(value: Any, where: str) -> str:
    """Return a string, or text blocks joined."""
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
    """Convert one of Anthropic's messages; its tool results become separate messages."""
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
            # reasoning of an earlier turn is not shown again
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


async def count_tokens(service: Service, asked: CountTokensBody) -> bytes:
    """Return the answer to ``/v1/messages/count_tokens``."""
    request = parse_chat(_chat_body(asked, service.rules), service.rules)
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
    """Return the body of an answer that is not streamed."""
    head = AnswerHead.of("msg", request_id, service, request.options)
    content: list[dict[str, Any]] = []
    last = None
    async with aclosing(chat_pieces(service, request, head, arrival)) as pieces:
        async for last in pieces:
            for part in _parts(last):
                _add(part, last.calls, content)
    assert last is not None, "an answer has a last piece"
    calls = iter(last.calls)
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = object_of(next(calls).arguments)
    return encode(
        _message(head)
        | {"content": content or [{"type": "text", "text": ""}], "usage": _usage(last.usage)}
        | _stop(last.finish_reason, last.stop_reason, called=bool(last.calls))
    )


# reasoning, text, or a piece of a call
_Part: TypeAlias = tuple[str, str] | CallDelta


def _parts(piece: ChatPiece) -> list[_Part]:
    thoughts: list[_Part] = [("thinking", piece.reasoning)] if piece.reasoning else []
    return thoughts + [("text", part) if isinstance(part, str) else part for part in piece.parts]


def _begun(part: _Part, calls: list[Call]) -> dict[str, Any]:
    """Return the empty block that a part opens."""
    if isinstance(part, CallDelta):
        call = calls[part.index]
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    return {"type": part[0], part[0]: ""} | ({"signature": ""} if part[0] == "thinking" else {})


def _begins(part: _Part, block: str) -> bool:
    """Return whether a part opens a new block after one of type ``block``."""
    return part.name is not None if isinstance(part, CallDelta) else part[0] != block


def _add(part: _Part, calls: list[Call], content: list[dict[str, Any]]) -> None:
    """Append to the content of an answer; a call's arguments are left out."""
    if _begins(part, content[-1]["type"] if content else ""):
        content.append(_begun(part, calls))
    if not isinstance(part, CallDelta):
        kind, text = part
        content[-1][kind] += text


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
    """Return arguments as an object; an empty one if a limit has cut them off."""
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
    """Yield the events of a streamed answer, from ``message_start`` to ``message_stop``."""
    head = AnswerHead.of("msg", request_id, service, request.options)
    # the type of the open content block; empty: no block is open
    block = ""
    index = -1
    started = False
    quiet = Quiet()
    async with aclosing(chat_pieces(service, request, head, arrival)) as pieces:
        async for piece in pieces:
            data = b""
            if not started:
                started = True
                message = _message(head) | {"usage": _usage(piece.usage)}
                data = _event("message_start", message=message) + _event("ping")
            for part in _parts(piece):
                if _begins(part, block):
                    data += _event("content_block_stop", index=index) if block else b""
                    begun = _begun(part, piece.calls)
                    block, index = begun["type"], index + 1
                    data += _event("content_block_start", index=index, content_block=begun)
                if said := part.arguments if isinstance(part, CallDelta) else part[1]:
                    data += _delta_event(block, index, said)
            if piece.finish_reason is not None:
                data += _event("content_block_stop", index=index) if block else b""
                stop = _stop(piece.finish_reason, piece.stop_reason, called=bool(piece.calls))
                data += _event("message_delta", delta=stop, usage=_usage(piece.usage))
                data += _event("message_stop")
            elif block and not data and quiet.has_lasted:
                data = _delta_event(block, index, "")
            if data:
                quiet.begin()
                yield data


_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _delta_event(block: str, index: int, said: str) -> bytes:
    kind, name = _DELTAS[block]
    return _event("content_block_delta", index=index, delta={"type": kind, name: said})
