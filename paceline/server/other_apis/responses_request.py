"""A body of ``/v1/responses`` as a chat body, and what is said back about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import Fields, show
from paceline.server.bodies.protocol import ChatRequest, RequestRules, parse_chat

__all__ = ["NO_EFFECT", "REFUSED", "ResponsesRequest", "parse_responses", "previous_id"]

_SAME: Final = (
    "model", "temperature", "top_p", "stream", "seed", "user", "parallel_tool_calls",
    "presence_penalty", "frequency_penalty", "slo", "priority", "cache_salt", "top_k", "min_p",
    "repetition_penalty", "structured_outputs", "request_id", "service_tier",
    "safety_identifier", "explain", "chat_template_kwargs",
)  # fmt: skip
NO_EFFECT: Final = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
REFUSED: Final = (
    "conversation", "prompt", "max_tool_calls", "context_management", "moderation", "image",
    "access_programs",
)  # fmt: skip
_FORMATS: Final = ("text", "json_object", "json_schema")
# fields of a chat body -> what they are made from, where that is called otherwise
_FROM: Final = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "response_format.json_schema.schema": "text",
}
_INCLUDES: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """See ``parse_responses``."""

    chat: ChatRequest
    # the conversation, without this request's instructions
    messages: list[dict[str, Any]]
    # fields that the answer repeats
    shown: dict[str, Any]
    store: bool
    background: bool
    # who may see what is stored
    owner: str
    # vLLM's: the answer tells the prompt and the output as they were tokenised
    tells_messages: bool


def previous_id(body: dict[str, Any]) -> str | None:
    """The response this request goes on from."""
    return Fields(body).string("previous_response_id", 1, 256)


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
        before: the stored conversation that ``previous_response_id`` names, in chat messages.
        owner: who asks.

    Raises InvalidRequestError or UnknownModelError.
    """
    fields = Fields(body)
    previous = fields.string("previous_response_id", 1, 256)
    chat = {name: value for name in _SAME if (value := fields.raw(name)) is not None}
    _refuse(fields)
    messages = [*before, *_input(fields.raw("input"))]
    instructions = fields.string("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat["messages"] = [*system, *messages]
    limit = fields.integer("max_output_tokens", 1, 2**31 - 1)
    if limit is not None:
        chat["max_completion_tokens"] = limit
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.array("tools") or [])]
    choice = fields.raw("tool_choice")
    if tools:
        chat["tools"] = tools
    if choice is not None and (tools or choice != "auto"):
        chat["tool_choice"] = _tool_choice(choice)
    text = fields.object("text") or {}
    chat |= _format(text)
    reasoning = fields.object("reasoning") or {}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    top = fields.integer("top_logprobs", 0, 20)
    includes = fields.array("include") or []
    for item in includes:
        if item not in _INCLUDES:
            raise InvalidRequestError(f"include holds {show(item)}, which is not served", "include")
    if top or _INCLUDES[0] in includes:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    truncation = fields.string("truncation") or "disabled"
    if truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    elif truncation != "disabled":
        raise InvalidRequestError(
            f"truncation must be auto or disabled, got {show(truncation)}", "truncation"
        )
    store = fields.boolean("store", True)
    background = fields.boolean("background", False)
    stream = fields.boolean("stream", False)
    fields.raw("stream_options")
    if background and (not store or stream):
        raise InvalidRequestError("background needs store=true and stream=false", "background")
    tells_messages = fields.boolean("enable_response_messages", False)
    metadata = fields.object("metadata") or {}
    unknown = fields.unknown()
    if unknown:
        raise InvalidRequestError(f"{', '.join(unknown)}: not served in /v1/responses")
    try:
        request = parse_chat(chat, rules, tenant, cuts_max_tokens=True)
    except InvalidRequestError as error:
        raise _renamed(error) from None
    sampling = request.options.sampling
    shown = {
        "background": background,
        "instructions": instructions,
        "max_output_tokens": limit,
        "max_tool_calls": None,
        "metadata": metadata,
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": previous,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": request.options.service_tier or "default",
        "store": store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice,
        "tools": fields.array("tools") or [],
        "top_logprobs": top or 0,
        "top_p": sampling.top_p,
        "truncation": truncation,
        "user": fields.raw("user"),
    }
    return ResponsesRequest(
        chat=request,
        messages=messages,
        shown=shown,
        store=store,
        background=background,
        owner=owner,
        tells_messages=tells_messages,
    )


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """A fault of the chat body, by the name of the field that it was made from."""
    name = None if error.param is None else _FROM.get(error.param)
    if error.param is None or name is None:
        return error
    message = str(error)
    if message.startswith(f"{error.param}="):
        message = name + message.removeprefix(error.param)
    return InvalidRequestError(message, name)


def _refuse(fields: Fields) -> None:
    for name in REFUSED:
        if fields.raw(name) is not None:
            raise InvalidRequestError(f"{name} is not served in /v1/responses", name)
    for name in NO_EFFECT:
        fields.raw(name)


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
    """Append one item's message; calls that follow each other are one message's."""
    kind = item.get("type", "message") if type(item) is dict else None
    if kind == "reasoning":
        # an earlier turn's: part of the message that follows
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
    """Whether the last message is thoughts so far."""
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
