"""Chat completion requests, translated for Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from paceline.errors import InvalidRequestError
from paceline.gateway.requests.body import Body

__all__ = ["cannot_say", "ignored_fields", "messages_request"]

# fields that are translated, or have no effect on the answer
_TRANSLATED: Final = frozenset(
    {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
        "stop", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "n", "logprobs", "top_logprobs", "user", "safety_identifier", "metadata",
        "store", "modalities", "slo", "priority",
    }
)  # fmt: skip
_MAX_TEMPERATURE: Final = 1.0
_NULL: Final = b"null"


def cannot_say(body: Body) -> str:
    """Return why Anthropic's API cannot serve a request, which is then not sent there; "": it can.
    Fields that it would merely ignore (``ignored_fields``) are reported in a header."""
    fields = body.fields
    if body.n > 1:
        return "Anthropic's API returns one choice"
    if fields.get("logprobs", _NULL) not in (_NULL, b"false"):
        return "Anthropic's API returns no logprobs"
    for name in ("functions", "function_call", "audio", "resume_output_ids", "grammar"):
        if fields.get(name, _NULL) != _NULL:
            return f"Anthropic's API has no {name}"
    kind = _format(fields)
    if kind not in ("text", "json_schema"):
        return f"Anthropic's API has no response_format {kind}"
    return ""


def ignored_fields(body: Body) -> Sequence[str]:
    return [
        name for name, value in body.fields.items() if name not in _TRANSLATED and value != _NULL
    ][:16]


def _format(fields: Mapping[str, bytes]) -> str:
    value = fields.get("response_format", _NULL)
    if value == _NULL:
        return "text"
    found = msgspec.json.decode(value)
    return str(found.get("type", "?"))[:40] if isinstance(found, dict) else "?"


def messages_request(chat: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Translate a request. Raises InvalidRequestError for malformed messages.

    Args:
        max_tokens: limit of the answer, which Anthropic's API requires.
    """
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    given = chat.get("messages")
    if not isinstance(given, list):
        raise InvalidRequestError("messages must be a list", "messages")
    for number, message in enumerate(given):
        if not isinstance(message, dict):
            raise InvalidRequestError(f"messages[{number}] must be an object", "messages")
        _add(message, number, system, messages)
    request: dict[str, Any] = {
        "model": chat.get("model"),
        "max_tokens": max_tokens,
        "messages": messages,
    }
    if system:
        request["system"] = "\n".join(system)
    for name in ("top_p", "top_k", "stream"):
        if chat.get(name) is not None:
            request[name] = chat[name]
    if isinstance(heat := chat.get("temperature"), (int, float)):
        request["temperature"] = min(heat, _MAX_TEMPERATURE)
    stop = chat.get("stop")
    if stop:
        request["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if who := chat.get("safety_identifier") or chat.get("user"):
        request["metadata"] = {"user_id": who}
    if tools := chat.get("tools"):
        request["tools"] = [_tool(tool) for tool in tools]
        if choice := _choice(chat):
            request["tool_choice"] = choice
    format_ = chat.get("response_format")
    if isinstance(format_, dict) and format_.get("type") == "json_schema":
        schema = (format_.get("json_schema") or {}).get("schema") or {}
        request["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return request


def _add(
    message: Mapping[str, Any], number: int, system: list[str], messages: list[dict[str, Any]]
) -> None:
    """Translate one message of a chat."""
    role, content = message.get("role"), message.get("content")
    if role in ("system", "developer"):
        system += [part["text"] for part in _parts(content, number) if part["type"] == "text"]
        return
    if role in ("tool", "function"):
        result = {
            "type": "tool_result",
            "tool_use_id": message.get("tool_call_id", ""),
            "content": _parts(content, number),
        }
        last = messages[-1] if messages else {}
        if last.get("role") == "user" and last["content"][-1]["type"] == "tool_result":
            # results of parallel calls belong into one message
            last["content"].append(result)
        else:
            messages.append({"role": "user", "content": [result]})
        return
    if role not in ("user", "assistant"):
        raise InvalidRequestError(f"messages[{number}].role is {str(role)[:40]!r}", "messages")
    parts = _parts(content, number)
    if role == "assistant":
        parts += [_call(call, number) for call in message.get("tool_calls") or ()]
        if not parts:
            return
    messages.append({"role": role, "content": parts})


def _parts(content: Any, number: int) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        # the API refuses an empty text
        return [{"type": "text", "text": content}] if content else []
    found = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal"):
            text = part.get("text") or part.get("refusal") or ""
            found += [{"type": "text", "text": text}] if text else []
        elif kind == "image_url":
            found.append({"type": "image", "source": _image(part.get("image_url"))})
        else:
            raise InvalidRequestError(
                f"messages[{number}].content has a part of type {str(kind)[:40]!r}, which this "
                "model's engine does not accept",
                "messages",
            )
    return found


def _image(image: Any) -> dict[str, Any]:
    url = image.get("url", "") if isinstance(image, dict) else str(image)
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url[len("data:") :].partition(",")
    return {"type": "base64", "media_type": head.partition(";")[0], "data": data}


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except msgspec.MsgspecError:
        raise InvalidRequestError(
            f"messages[{number}].tool_calls has arguments that are not JSON", "messages"
        ) from None
    return {
        "type": "tool_use",
        "id": call.get("id", ""),
        "name": function.get("name", ""),
        "input": arguments,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or {}
    found: dict[str, Any] = {
        "name": function.get("name"),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if function.get("description"):
        found["description"] = function["description"]
    if function.get("strict") is not None:
        found["strict"] = function["strict"]
    return found


def _choice(chat: Mapping[str, Any]) -> dict[str, Any]:
    choice = chat.get("tool_choice")
    found: dict[str, Any] = {}
    if isinstance(choice, dict):
        found = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    elif choice is not None:
        found = {"type": {"required": "any", "none": "none"}.get(choice, "auto")}
    if chat.get("parallel_tool_calls") is False and found.get("type") != "none":
        found = {"type": "auto", **found, "disable_parallel_tool_use": True}
    return found
