"""Earlier calls of a conversation, in the form that the chat template expects.

Callers send calls in one form: any id, and arguments as an object. Mistral's templates accept only
ids of nine letters and digits, and some templates expect arguments as JSON text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from string import ascii_letters, digits
from typing import Any, Final

from paceline.errors import InvalidRequestError

__all__ = ["render_with_calls", "wants_short_ids"]

Messages = list[dict[str, Any]]

_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_MARKS: Final = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
_LENGTH: Final = re.compile(
    r"\blength\b[\s()]{0,8}[!=]=\s{0,8}9\b|\b9\s{0,8}[!=]=[^\n%{}]{1,80}\blength\b"
)
_DIGITS: Final = digits + ascii_letters


def wants_short_ids(template: str | None) -> bool:
    """Return whether a chat template, like Mistral's, needs ids of nine letters and digits."""
    return template is not None and (
        any(mark in template for mark in _MARKS) or _LENGTH.search(template) is not None
    )


def render_with_calls(
    render: Callable[[Messages], str], messages: Messages, template: str | None
) -> str:
    """Return the text of a conversation, with arguments as objects, or as JSON text where the
    template cannot show objects. Raises what ``render`` raises."""
    calls = list(_functions(messages))
    if wants_short_ids(template):
        messages = _with_short_ids(messages)
    if not calls:
        return render(messages)
    try:
        text = render(messages)
    except InvalidRequestError as error:
        # a rendering that hit its resource limit is not repeated
        if "was stopped" in str(error):
            raise
        try:
            return render(_with_text(messages))
        except InvalidRequestError:
            raise error from None
    if all(_shows(text, call["arguments"]) for call in calls):
        return text
    try:
        other = render(_with_text(messages))
    except InvalidRequestError:
        return text
    return other if all(_json(call["arguments"]) in other for call in calls) else text


def _functions(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["function"]


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _shows(text: str, arguments: dict[str, Any]) -> bool:
    """Return whether a template has printed arguments, but not in Python's notation."""
    if _json(arguments) in text or not arguments:
        return True
    return str(arguments) not in text and all(name in text for name in arguments)


def _with_calls(messages: Messages, change: Callable[[int, dict[str, Any]], Any]) -> Messages:
    """Return messages with each call replaced by ``change(index among all calls, call)``."""
    place = 0
    changed: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [change(place + i, c) for i, c in enumerate(calls)]}
            place += len(calls)
        changed.append(message)
    return changed


def _with_text(messages: Messages) -> Messages:
    def change(_: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _json(function["arguments"])}}

    return _with_calls(messages, change)


def _with_short_ids(messages: Messages) -> Messages:
    """Map ids of another form, equal ones to equal ones; a call without an id gets one, and results
    without one belong to the calls before them, in order."""

    def change(place: int, call: dict[str, Any]) -> dict[str, Any]:
        known = call.get("id")
        return {**call, "id": _short(known if type(known) is str and known else f"call {place}")}

    changed = _with_calls(messages, change)
    open_ids: list[str] = []
    for place, message in enumerate(changed):
        if message.get("tool_calls"):
            open_ids = [call["id"] for call in message["tool_calls"]]
        elif message["role"] == "tool":
            known = message.get("tool_call_id")
            of = _short(known) if known else open_ids[0] if open_ids else _short("call")
            open_ids = [call_id for call_id in open_ids if call_id != of]
            changed[place] = {**message, "tool_call_id": of}
    return changed


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    short = ""
    for _ in range(9):
        number, rest = divmod(number, len(_DIGITS))
        short += _DIGITS[rest]
    return short
