"""Reading of a request for the decision about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.gateway.proxy.upstream_request import CHAT
from paceline.gateway.requests.body import Body
from paceline.routing.cascade import Conversations, form_of, ngrams_of

__all__ = ["PROMPT_FIELDS", "Prompt", "read_prompt"]

# fields of a chat that a prompt is read from
PROMPT_FIELDS: Final = ("messages", "tools", "response_format", "tool_choice")

# fields with the messages, and with the system prompt, where they are not those of a chat
_MESSAGES: Final = {
    "/v1/completions": ("prompt", "system"),
    "/v1/responses": ("input", "instructions"),
}


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


class _Function(msgspec.Struct):
    name: str = ""
    parameters: Any = None


class _Tool(msgspec.Struct):
    # of a chat; other APIs have the name at the top
    function: _Function | None = None
    name: str = ""


class Prompt(msgspec.Struct, frozen=True, dict=True):
    """One request for text, of any API."""

    # text of the last message of the user
    text: str
    # digest of the tenant, and of what the conversation's turns have in common
    conversation: bytes
    num_messages: int
    # parameters of the tools, by name
    tools: Mapping[str, Any]
    # one of these must be called
    wants_call: bool
    wants_json: bool
    # schema of the JSON; None: any
    schema: Any
    # of the text, of length 1, where a model embeds prompts
    embedding: Sequence[float] = ()

    @cached_property
    def ngrams(self) -> NDArray[np.float32]:
        """Hashed n-grams of the text, and behind them its embedding."""
        found = ngrams_of(self.text)
        if not self.embedding:
            return found
        return np.concatenate((found, np.array(self.embedding, np.float32)))

    def form(self) -> list[float]:
        return form_of(
            self.text, turns=self.num_messages, tools=len(self.tools), wants_json=self.wants_json
        )


def read_prompt(
    body: Body, tenant: str, conversation: bytes = b"", path: str = CHAT
) -> Prompt | None:
    """Read a request; None: it is malformed, which the engine reports.

    Args:
        conversation: name that the caller gives it; empty: its system prompt and first question
            tell it apart from others.
    """
    fields = body.fields
    try:
        messages = _messages_of(path, fields)
        tools = msgspec.json.decode(fields.get("tools", b"[]"), type=list[_Tool] | None) or []
        wanted = msgspec.json.decode(fields.get("response_format", b"null"))
        choice = msgspec.json.decode(fields.get("tool_choice", b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    asked = [_text_of(each.content) for each in messages if each.role == "user"]
    if not asked:
        return None
    system = [_text_of(each.content) for each in messages if each.role in ("system", "developer")]
    # a name and a digest of texts never meet
    parts = [b"named", conversation] if conversation else [b"told", *map(_bytes, system[:1])]
    parts += [] if conversation else [_bytes(asked[0])]
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    offered = [tool.function or _Function(tool.name) for tool in tools]
    return Prompt(
        text=asked[-1],
        conversation=Conversations.key([tenant.encode(), *parts]),
        num_messages=len(messages),
        tools={tool.name: tool.parameters for tool in offered if tool.name},
        wants_call=choice == "required" or (isinstance(choice, dict) and "function" in choice),
        wants_json=kind in ("json_object", "json_schema"),
        schema=_schema_of(wanted) if kind == "json_schema" else None,
    )


def _messages_of(path: str, fields: Mapping[str, bytes]) -> list[_Message]:
    """Return the messages of a request, or its texts as messages. Raises MsgspecError."""
    messages, name = _MESSAGES.get(path, ("messages", "system"))
    told = msgspec.json.decode(fields.get(messages, b"null"), type=str | list[_Message])
    found = [_Message("user", told)] if isinstance(told, str) else told
    if path != CHAT and name in fields:
        found.insert(0, _Message("system", msgspec.json.decode(fields[name])))
    return found


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _text_of(content: Any) -> str:
    """Return the text of a message, whose content may have parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [each.get("text") for each in content if isinstance(each, dict)]
    return "\n".join(part for part in parts if isinstance(part, str))


def _schema_of(wanted: Mapping[str, Any]) -> Any:
    found = wanted.get("json_schema")
    return found.get("schema") if isinstance(found, dict) else None
