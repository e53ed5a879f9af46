"""Chat messages: the callers' form, turned into the plain dicts that a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from paceline.errors import InvalidRequestError
from paceline.http.fields import check_array, show
from paceline.server.protocol.field_types import described, unread
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import (
    NULL,
    STRING,
    Schema,
    array,
    bounded,
    nullable,
    record,
    ref,
    string,
)

__all__ = ["MESSAGES", "USUAL_ROLES", "message_schemas", "parse_messages"]

# any role that a template may know; a message that it leaves out is refused after rendering
_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
USUAL_ROLES: Final = frozenset(_ROLES)
_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_OTHER_PARTS: Final = {
    "image_url": "images",
    "input_image": "images",
    "image_pil": "images",
    "image_embeds": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "file": "files",
}
# keys that are read of a message, and of a part of its content
_NAMES: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
)
_PART_NAMES: Final = frozenset({"type", *_TEXT_PARTS.values()})


def message_schemas() -> dict[str, Schema]:
    """Return schemas of ``parse_messages``' input, for the usual roles; they refer to one another
    by name."""
    function = record(
        {"name": STRING}, {"arguments": bounded(STRING, "the JSON text of an object")}
    )
    parts = {"type": string("text", "input_text", "output_text"), "text": STRING}
    return {
        "Message": record(
            {"role": string(*_ROLES)},
            {
                "content": {"anyOf": [STRING, array(ref("TextPart")), NULL]},
                "name": nullable(STRING),
                "tool_calls": nullable(array(ref("CallMade"))),
                "tool_call_id": nullable(STRING),
                "reasoning": nullable(STRING),
            },
        ),
        "TextPart": {"anyOf": [STRING, record(parts)]},
        "CallMade": record({"function": function}, {"id": STRING, "type": string("function")}),
    }


def _checked(value: Any, name: str, _: RequestRules) -> list[dict[str, Any]]:
    return parse_messages(check_array(value, name))


def _unread(values: list[dict[str, Any]]) -> Iterator[str]:
    for index, value in enumerate(values):
        if not value.keys() <= _NAMES:
            yield from unread(value, _NAMES, f"[{index}]")
        parts = value.get("content")
        if type(parts) is list:
            for place, part in enumerate(parts):
                if type(part) is dict and not part.keys() <= _PART_NAMES:
                    yield from unread(part, _PART_NAMES, f"[{index}].content[{place}]")


MESSAGES: Final = replace(described(_checked, array(ref("Message"), 1)), unread=_unread)


def parse_messages(values: list[Any]) -> list[dict[str, Any]]:
    """Return messages with ``content`` joined to one string, ready for a template.

    Raises InvalidRequestError naming the message by its index.
    """
    if not values:
        raise InvalidRequestError("messages must hold at least 1 message, got 0", "messages")
    return [_message(value, f"messages[{index}]") for index, value in enumerate(values)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequestError(f"{where} must be an object, got {show(value)}", "messages")
    role = value.get("role")
    if type(role) is not str or not _ROLE.fullmatch(role):
        raise InvalidRequestError(
            f"{where}.role must be system, developer, user, assistant, tool, or another name of up "
            f"to 64 letters, digits, _ and - that the chat template takes, got {show(role)}",
            "messages",
        )
    message: dict[str, Any] = {"role": role}
    tool_calls = value.get("tool_calls")
    if tool_calls and role != "assistant":
        raise InvalidRequestError(
            f"{where}.tool_calls belongs to assistant messages, not to role {role}", "messages"
        )
    content = value.get("content")
    if content is None and tool_calls:
        # templates write content unconditionally
        message["content"] = ""
    else:
        message["content"] = _content(content, f"{where}.content")
    if tool_calls:
        message["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        text = value.get(name)
        if text is None:
            continue
        if type(text) is not str:
            raise InvalidRequestError(
                f"{where}.{name} must be a string, got {show(text)}", "messages"
            )
        if name.startswith("reasoning"):
            # the new name, and the one that templates still read
            message["reasoning"] = message["reasoning_content"] = text
        else:
            message[name] = text
    return message


def _content(content: Any, where: str) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise InvalidRequestError(
            f"{where} must be a string or a list of text parts, got {show(content)}", "messages"
        )
    return "\n".join(_text_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    if type(part) is str:
        return part
    if type(part) is not dict:
        raise InvalidRequestError(f"{where} must be an object, got {show(part)}", "messages")
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if type(kind) is str else None
    if field is None:
        what = _OTHER_PARTS.get(kind) if type(kind) is str else None
        if what is not None:
            raise InvalidRequestError(
                f"{where} has type {show(kind)}: {what} are not served yet, text is", "messages"
            )
        raise InvalidRequestError(f"{where}.type must be 'text', got {show(kind)}", "messages")
    text = part.get(field)
    if type(text) is not str:
        raise InvalidRequestError(f"{where}.{field} must be a string, got {show(text)}", "messages")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Parse an assistant's earlier calls, whose arguments are JSON text; templates want objects."""
    if type(calls) is not list:
        raise InvalidRequestError(f"{where} must be a list, got {show(calls)}", "messages")
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if type(call) is dict else None
        name = function.get("name") if type(function) is dict else None
        if type(function) is not dict or type(name) is not str:
            raise InvalidRequestError(
                f"{where}[{index}] must be an object with function.name", "messages"
            )
        arguments = function.get("arguments")
        if arguments is None or type(arguments) is str:
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.MsgspecError, RecursionError, UnicodeError):
                arguments = None
        if type(arguments) is not dict:
            raise InvalidRequestError(
                f"{where}[{index}].function.arguments must be the JSON text of an object",
                "messages",
            )
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed
