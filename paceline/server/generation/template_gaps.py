"""Parts of a conversation that a chat template leaves out, and how they are written instead.

Templates skip messages of roles that they do not know, or refuse them: ``developer``, ``tool``, the
calls of an assistant, a system message after the first. So a conversation of the same shape, with
marks in place of its texts, is rendered first::

    system, user, assistant with a call, tool   -->  template  -->  which marks are in the text

and if a mark is missing, other ways to write the conversation are tried, the smallest change first:
a developer message becomes a system message; calls become JSON in the assistant's turn and results
go into the user's, as in llama.cpp; system messages are merged at the beginning, or put into the
first user message.

This module does not know tokenizers or HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from paceline.errors import InvalidRequestError
from paceline.server.protocol.messages import USUAL_ROLES
from paceline.server.protocol.tool_calls import tools_message

__all__ = ["REWRITTEN", "Conversation", "TemplateGaps", "Written"]

# parts of the current answer's conversation that were rewritten; set at the start of an exchange
REWRITTEN: Final[ContextVar[dict[str, None] | None]] = ContextVar("rewritten", default=None)

Messages: TypeAlias = list[dict[str, Any]]

_SYSTEMS: Final = ("system", "developer")
_KEPT: Final = "kept"
# where system messages go
_FIRST, _IN_USER = "first", "in user"
# how calls are written: in a message whose content is null, as some templates require; as text
_NULL, _TEXT = "null", "text"
# maximum shapes of conversations that are remembered
_MOST_SHAPES: Final = 512
_MOST_KEY: Final = 4096
# seconds after which no further way is tried
_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render.

    Args:
        source: the template's text; None: the renderer uses no template.
        variant: further arguments that change the rendering; None: too long to be remembered.
    """

    messages: Messages
    tools: Sequence[dict[str, Any]] | None
    source: str | None
    variant: str | None = ""


@dataclass(frozen=True, slots=True)
class Written:
    """The conversation as it is passed to the template."""

    messages: Messages
    tools: Sequence[dict[str, Any]] | None
    # rewritten parts, described for the caller
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to write down a conversation."""

    # a developer message is written as a system message
    developer: bool = False
    system: str = _KEPT
    calls: str = _KEPT
    # parts that the template still leaves out
    lost: tuple[str, ...] = ()

    def apply(self, messages: Messages) -> Messages:
        if self.developer:
            messages = [
                {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
            ]
        if self.calls == _NULL:
            messages = [
                {**m, "content": m["content"] or None} if m.get("tool_calls") else m
                for m in messages
            ]
        elif self.calls == _TEXT:
            messages = _calls_as_text(messages)
        if self.system != _KEPT:
            messages = _systems_moved(messages, in_user=self.system == _IN_USER)
        return messages

    def notes(self, messages: Messages) -> Iterator[str]:
        roles = {message["role"] for message in messages}
        if self.developer and "developer" in roles:
            yield "developer as system"
        if self.system == _FIRST:
            yield "system messages as one"
        elif self.system == _IN_USER:
            yield "system in the user message"
        if self.calls == _TEXT and any(message.get("tool_calls") for message in messages):
            yield "tool_calls as text"
        if self.calls == _TEXT and "tool" in roles:
            yield "tool results as user messages"
        for what in self.lost:
            yield f"left out: {what}"


class TemplateGaps:
    """Finds how conversations must be written, and remembers it by their shape. Thread-safe."""

    def __init__(self) -> None:
        self._ways: dict[Any, _Way] = {}

    def fill(
        self,
        asked: Conversation,
        render: Callable[[Messages, Sequence[dict[str, Any]] | None], str],
    ) -> Written:
        """Return the conversation in a form that the template shows completely.

        Raises:
            InvalidRequestError: a message of an unusual role is left out.
            RequestFailedError: the renderer failed.
        """
        messages, tools = asked.messages, asked.tools
        notes: list[str] = []
        if any(message["role"] == "function" for message in messages):
            # OpenAI's older name
            messages = [_as_tool(message) for message in messages]
            notes.append("function as tool")
        in_words = asked.source is not None and "tools" not in asked.source and bool(tools)
        if tools and in_words:
            messages, tools = _tools_as_text(messages, tools), None
            notes.append("tools as text")
        if in_words or not all(map(_is_plain, messages)):
            way = self._way(replace(asked, messages=messages, tools=tools), in_words, render)
            _check_roles(messages, way.lost)
            notes += way.notes(messages)
            messages = way.apply(messages)
        return Written(messages, tools, tuple(notes))

    def _way(
        self,
        asked: Conversation,
        in_words: bool,
        render: Callable[[Messages, Sequence[dict[str, Any]] | None], str],
    ) -> _Way:
        messages = _shortened(asked.messages)
        shape = (asked.variant, bool(asked.tools), in_words, *map(_shape, messages))
        way = self._ways.get(shape)
        if way is None:
            way = _find(replace(asked, messages=messages), in_words, render)
            if asked.variant is not None and len(shape) < _MOST_KEY:
                if len(self._ways) >= _MOST_SHAPES:
                    self._ways.clear()
                self._ways[shape] = way
        return way


def _find(
    asked: Conversation,
    in_words: bool,
    render: Callable[[Messages, Sequence[dict[str, Any]] | None], str],
) -> _Way:
    """Return the first way that leaves nothing out, or else the one that leaves out least."""
    marked, marks = _marked(asked.messages)
    best: _Way | None = None
    until = time.monotonic() + _SECONDS
    ways = list(_ways(asked, in_words))
    for way in ways:
        try:
            text = render(way.apply(marked), asked.tools)
        except InvalidRequestError:
            text = None
        if text is not None:
            missing = {what for what, mark in marks if mark not in text}
            found = replace(way, lost=tuple(sorted(missing)))
            if not missing - {_BESIDE}:
                return found
            if best is None or len(found.lost) < len(best.lost):
                best = found
        if time.monotonic() > until:
            break
    # if the template refuses all ways, the caller gets the error of the first
    return best or ways[0]


def _ways(asked: Conversation, in_words: bool) -> Iterator[_Way]:
    messages = asked.messages
    systems = [i for i, message in enumerate(messages) if message["role"] in _SYSTEMS]
    has_developer = any(message["role"] == "developer" for message in messages)
    knows_developer = asked.source is None or "developer" in asked.source
    has_calls = any(message.get("tool_calls") for message in messages)
    has_results = any(message["role"] == "tool" for message in messages)
    developer = (False, True) if has_developer and knows_developer else (has_developer,)
    # calls are written as the prompt tells the model to write them
    if in_words:
        calls = [_TEXT]
    else:
        calls = [_KEPT, *[_NULL] * has_calls, *[_TEXT] * (has_calls or has_results)]
    systems_at = [_KEPT]
    if systems:
        systems_at += [_IN_USER] if systems == [0] else [_FIRST, _IN_USER]
    for place in systems_at:
        for as_text in calls:
            for as_system in developer:
                yield _Way(developer=as_system, system=place, calls=as_text)


# content next to calls in an assistant's message, which some templates leave out
_BESIDE: Final = "content beside tool_calls"


def _marked(messages: Messages) -> tuple[Messages, list[tuple[str, str]]]:
    """Return a conversation of the same shape, and the marks that its rendering must show."""
    marked: Messages = []
    marks: list[tuple[str, str]] = []
    ids: dict[Any, str] = {}
    for place, message in enumerate(messages):
        role, said = message["role"], f"Said{place}x"
        made = {**message, "content": said}
        for name in ("reasoning", "reasoning_content"):
            if name in message:
                made[name] = f"Thought{place}x"
        calls = message.get("tool_calls")
        if calls:
            made["content"] = said if message["content"] else ""
            made["tool_calls"] = [_call_marked(call, place, i, ids) for i, call in enumerate(calls)]
            marks += [
                ("tool_calls", f"{kind}{place}n{i}x")
                for i in range(len(calls))
                for kind in ("Called", "Value")
            ]
            marks += [(_BESIDE, said)] if message["content"] else []
        elif role not in ("user", "assistant"):
            marks.append((role, said))
        if "tool_call_id" in message:
            made["tool_call_id"] = ids.get(message["tool_call_id"], "c00000000")
        marked.append(made)
    return marked, marks


def _call_marked(call: dict[str, Any], place: int, index: int, ids: dict[Any, str]) -> Any:
    # nine letters and digits, as Mistral's templates require
    call_id = f"c{place % 10000:04d}{index % 10000:04d}"
    ids[call.get("id")] = call_id
    function = {
        "name": f"Called{place}n{index}x",
        "arguments": {"given": f"Value{place}n{index}x"},
    }
    return {**call, "id": call_id, "type": "function", "function": function}


def _is_plain(message: dict[str, Any]) -> bool:
    return message["role"] in ("user", "assistant") and not message.get("tool_calls")


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = message.get("tool_calls") or ()
    said = bool(message["content"]) if calls else True
    return (message["role"], len(calls), said, *sorted(message.keys() - {"content"}))


def _shortened(messages: Messages) -> Messages:
    """Shorten plain conversations to a system message and one by the user: these stand for all that
    begin so and continue with turns of both."""
    begins = [message["role"] for message in messages[:2]]
    if begins in (["system", "user"], ["developer", "user"]) and all(map(_is_plain, messages[1:])):
        return messages[:2]
    return messages


def _check_roles(messages: Messages, lost: Sequence[str]) -> None:
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in USUAL_ROLES and role in lost:
            raise InvalidRequestError(
                f"messages[{index}].role is {role!r}, and this model's chat template leaves such "
                f"messages out; it takes at most {', '.join(sorted(USUAL_ROLES))}",
                "messages",
            )


def _tools_as_text(messages: Messages, tools: Sequence[dict[str, Any]]) -> Messages:
    """Add the tools to the system message."""
    said = tools_message(list(tools))
    first = messages[0]
    if first["role"] in _SYSTEMS:
        return [{**first, "content": f"{first['content']}\n\n{said}"}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]


def _calls_as_text(messages: Messages) -> Messages:
    """Write calls and results in the form that ``tools_message`` asks for. Results and the user's
    text next to them become one turn, because templates want turns to alternate."""
    written: Messages = []
    # whether the previous turn is the user's, and whether it holds a result
    follows_user = follows_result = False
    for message in messages:
        is_result, content = message["role"] == "tool", message["content"]
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif message.get("tool_calls"):
            calls = [_call_as_text(call["function"]) for call in message["tool_calls"]]
            message = {k: v for k, v in message.items() if k != "tool_calls"}
            message["content"] = "\n".join([content, *calls]).strip()
        is_user = message["role"] == "user"
        joins = is_user and follows_user and (is_result or follows_result)
        if joins:
            written[-1] = {**written[-1], "content": f"{written[-1]['content']}\n{content}"}
        else:
            written.append(message)
        follows_user, follows_result = is_user, is_result or (joins and follows_result)
    return written


def _as_tool(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "tool"} if message["role"] == "function" else message


def _call_as_text(function: dict[str, Any]) -> str:
    call = {name: function[name] for name in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _systems_moved(messages: Messages, *, in_user: bool) -> Messages:
    """Merge the system messages, at the beginning or in the first user message."""
    said = "\n\n".join(m["content"] for m in messages if m["role"] in _SYSTEMS)
    first = next(m for m in messages if m["role"] in _SYSTEMS)
    others = [message for message in messages if message["role"] not in _SYSTEMS]
    if not in_user:
        return [{**first, "content": said}, *others]
    place = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": said}, *others]
    user = others[place]
    others[place] = {**user, "content": f"{said}\n\n{user['content']}"}
    return others
