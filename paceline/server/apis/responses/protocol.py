"""A body of ``/v1/responses``, turned into a chat body, and the fields that its answer repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_array, check_string, show
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    INT32,
    anything,
    array,
    boolean,
    choice,
    described,
    ignored,
    integer,
    mapping,
    needed,
    refused,
    string,
    unread,
    unread_each,
)
from paceline.server.protocol.generation import ChatBody
from paceline.server.protocol.requests import ChatRequest, RequestRules, parse_chat

__all__ = ["ResponsesBody", "ResponsesRequest", "parse_responses", "previous_id"]

_FORMATS: Final = ("text", "json_object", "json_schema")
# fields of a chat body -> their source, where its name differs
_FROM: Final = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "response_format.json_schema.schema": "text",
}
# name and description of a schema inform the caller; a schema is always enforced strictly
_FORMAT_NAMES: Final = ("type", "schema", "name", "description", "strict")
_TOOL_NAMES: Final = ("type", "name", "description", "parameters", "strict")
# keys of items and their parts, in requests and in answers
_ITEM_NAMES: Final = frozenset(
    {"type", "id", "status", "role", "content", "call_id", "name", "arguments", "output"}
    | {"summary", "encrypted_content"}
)
_PART_NAMES: Final = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
_INCLUDES: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
_ITEM: Final = schemas.record(
    {}, {"type": schemas.string("message", "function_call", "function_call_output", "reasoning")}
)
_TOOL: Final = schemas.record(
    {"type": schemas.string("function"), "name": schemas.STRING},
    {
        "description": schemas.nullable(schemas.STRING),
        "parameters": schemas.nullable(schemas.OBJECT),
        "strict": schemas.nullable(schemas.BOOLEAN),
    },
)
_FORMAT: Final = schemas.record(
    {"type": schemas.string(*_FORMATS)},
    {
        "name": schemas.STRING,
        "schema": {"type": ["object", "boolean"]},
        "strict": schemas.nullable(schemas.BOOLEAN),
    },
)
_UNSERVED: Final = refused(" is not served in /v1/responses", ())


def _includes(value: Any, name: str, _: RequestRules) -> list[Any]:
    for item in check_array(value, name):
        if item not in _INCLUDES:
            raise InvalidRequestError(f"{name} holds {show(item)}, which is not served", name)
    return list(value)


def _unread_input(value: Any) -> Iterator[str]:
    for place, item in enumerate(value if type(value) is list else ()):
        if type(item) is not dict:
            continue
        yield from unread(item, _ITEM_NAMES, f"[{place}]")
        yield from unread_each(item.get("content"), _PART_NAMES, f"[{place}].content")


def _unread_text(value: dict[str, Any]) -> list[str]:
    spec = value.get("format")
    inside = unread(spec, _FORMAT_NAMES, ".format") if type(spec) is dict else []
    return unread(value, ("format",)) + inside


class ResponsesBody(
    Body,
    passes=(
        ChatBody,
        (
            "model", "temperature", "top_p", "stream", "seed", "user", "parallel_tool_calls",
            "presence_penalty", "frequency_penalty", "slo", "priority", "cache_salt", "top_k",
            "min_p", "repetition_penalty", "structured_outputs", "request_id", "service_tier",
            "safety_identifier", "explain", "chat_template_kwargs",
        ),
    ),
    refuses_unknown="{names}: not served in /v1/responses",
):  # fmt: skip
    """``/v1/responses``."""

    input = replace(
        needed(
            anything({"anyOf": [schemas.STRING, schemas.array(_ITEM, 1)]}),
            "must be a string or a list of at least one item, got None",
            note="a text, or items: message, function_call, function_call_output, reasoning",
        ),
        unread=_unread_input,
    )
    instructions = string()
    max_output_tokens = integer(1, INT32, note="no more than the context has left")
    previous_response_id = string(
        1,
        256,
        note="stored in memory: the latest 2048, 64 MiB together; one without an answer (under "
        "way, failed, cancelled) is not gone on from",
    )
    store = boolean(True)
    background = boolean()
    tools = replace(
        array(schemas.array(_TOOL, 0, 128), note="functions"),
        unread=partial(unread_each, names=_TOOL_NAMES),
    )
    tool_choice = anything(schemas.ANYTHING, note="none, auto, required or {type: function, name}")
    text = replace(
        mapping(schemas.record({}, {"format": schemas.nullable(_FORMAT)}), note="`format`"),
        unread=_unread_text,
    )
    reasoning = mapping(
        lambda rules: schemas.record({}, {"effort": ChatBody.reasoning_effort.described(rules)}),
        names=("effort",),
        note="`effort` goes to the chat template, `none` also as `enable_thinking`",
    )
    top_logprobs = integer(0, MAX_LOGPROBS)
    include = described(
        _includes,
        schemas.array(schemas.string(*_INCLUDES)),
        note="`message.output_text.logprobs`; `reasoning.encrypted_content` has nothing to show",
    )
    truncation = choice("auto", "disabled", default="disabled")
    enable_response_messages = boolean(
        note="vLLM's: `input_messages` and `output_messages` tell text and ids as the model saw "
        "them"
    )
    metadata = mapping()
    stream_options = prompt_cache_key = prompt_cache_options = prompt_cache_retention = ignored()
    conversation = prompt = max_tool_calls = context_management = moderation = image = _UNSERVED
    access_programs = _UNSERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A parsed request; see ``parse_responses``."""

    chat: ChatRequest
    # the conversation, without this request's instructions
    messages: list[dict[str, Any]]
    # fields that the answer repeats
    shown: dict[str, Any]
    store: bool
    background: bool
    # the only key that may see the stored response
    owner: str
    # vLLM's option: the answer shows the prompt and the output as tokens
    tells_messages: bool


def previous_id(body: dict[str, Any]) -> str | None:
    """Return the id of the response that this request continues."""
    name = "previous_response_id"
    value = body.get(name)
    return None if value is None else check_string(value, name, 1, 256)


def parse_responses(
    body: dict[str, Any],
    rules: RequestRules,
    tenant: str,
    *,
    before: list[dict[str, Any]],
    owner: str,
) -> ResponsesRequest:
    """Check and translate a body.

    Args:
        before: the stored conversation that ``previous_response_id`` names, as chat messages.
        owner: the caller's key.

    Raises InvalidRequestError or UnknownModelError.
    """
    asked = ResponsesBody.read(body, rules)
    chat = asked.passed()
    messages = [*before, *_input(asked.input)]
    instructions = asked.instructions
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat["messages"] = [*system, *messages]
    if asked.max_output_tokens is not None:
        chat["max_completion_tokens"] = asked.max_output_tokens
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or [])]
    if tools:
        chat["tools"] = tools
    if asked.tool_choice is not None and (tools or asked.tool_choice != "auto"):
        chat["tool_choice"] = _tool_choice(asked.tool_choice)
    text, reasoning = asked.text or {}, asked.reasoning or {}
    chat |= _format(text)
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    top = asked.top_logprobs or 0
    if top or _INCLUDES[0] in (asked.include or ()):
        chat |= {"logprobs": True, "top_logprobs": top}
    if asked.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if asked.background and (not asked.store or chat.get("stream")):
        raise InvalidRequestError("background needs store=true and stream=false", "background")
    try:
        request = parse_chat(chat, rules, tenant, cuts_max_tokens=True)
    except InvalidRequestError as error:
        raise _renamed(error) from None
    options = replace(request.options, ignored_fields=asked.ignored_fields, store=asked.store)
    request = replace(request, options=options)
    sampling = request.options.sampling
    shown = {
        "background": asked.background,
        "instructions": instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": request.options.service_tier or "default",
        "store": asked.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": asked.tools or [],
        "top_logprobs": top,
        "top_p": sampling.top_p,
        "truncation": asked.truncation,
        "user": chat.get("user"),
    }
    return ResponsesRequest(
        chat=request,
        messages=messages,
        shown=shown,
        store=asked.store,
        background=asked.background,
        owner=owner,
        tells_messages=asked.enable_response_messages,
    )


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return a fault of the chat body under the name of its source field."""
    name = None if error.param is None else _FROM.get(error.param)
    if error.param is None or name is None:
        return error
    message = str(error)
    if message.startswith(f"{error.param}="):
        message = name + message.removeprefix(error.param)
    return InvalidRequestError(message, name)


def _input(value: Any) -> list[dict[str, Any]]:
    if type(value) is str:
        return [{"role": "user", "content": value}]
    if type(value) is not list or not value:
        raise InvalidRequestError(
            f"input must be a string or a list of at least one item, got {show(value)}", "input"
        )
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _item(item, f"input[{index}]", messages)
    return messages


def _item(item: Any, where: str, messages: list[dict[str, Any]]) -> None:
    """Append one item's message; consecutive calls share a message."""
    kind = item.get("type", "message") if type(item) is dict else None
    if kind == "reasoning":
        # reasoning of an earlier turn belongs to the message that follows
        parts = item.get("content")
        texts = [part.get("text") for part in parts or () if type(part) is dict]
        said = "".join(text for text in texts if type(text) is str)
        if said:
            messages.append({"role": "assistant", "content": "", "reasoning": said})
    elif kind == "message":
        message = {"role": item.get("role"), "content": item.get("content")}
        if message["role"] == "assistant" and _only_thought(messages):
            messages[-1] |= message
        else:
            messages.append(message)
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        if messages and (messages[-1].get("tool_calls") or _only_thought(messages)):
            before = messages[-1].get("tool_calls", [])
            messages[-1] = {**messages[-1], "tool_calls": [*before, call]}
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append(
            {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        )
    else:
        raise InvalidRequestError(
            f"{where}.type must be message, function_call, function_call_output or reasoning, "
            f"got {show(kind)}",
            "input",
        )


def _only_thought(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message holds only reasoning so far."""
    return bool(messages) and "reasoning" in messages[-1] and not messages[-1]["content"]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if type(tool) is dict else None
    if kind != "function":
        raise InvalidRequestError(
            f"{where}.type={show(kind)} is not served: tools are functions", "tools"
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if type(choice) is dict and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: dict[str, Any]) -> dict[str, Any]:
    wanted = text.get("format")
    if wanted is None:
        return {}
    kind = wanted.get("type") if type(wanted) is dict else None
    if kind not in _FORMATS:
        raise InvalidRequestError(
            f"text.format.type must be {', '.join(_FORMATS)}, got {show(kind)}", "text"
        )
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    if "schema" not in wanted:
        raise InvalidRequestError("text.format.schema is missing", "text")
    return {"response_format": {"type": kind, "json_schema": {"schema": wanted["schema"]}}}
