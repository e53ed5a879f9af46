"""Exact signals: faults of an answer that need no statistics, and cost nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from paceline.routing.cascade.json_schema import violation

__all__ = ["Answer", "agree", "exact_fault", "is_loop", "is_refusal", "plain_text"]

# openings of a refusal; later in a text the same words may be a part of a good answer
_REFUSAL: Final = re.compile(
    r"\W*(?:(?:i'?m|i am) (?:very |so )?(?:sorry|afraid|unable|not able)|sorry\b|i apologi[sz]e"
    r"|i (?:can'?t|cannot|can not|do ?n'?t know|do not know|won'?t|will not)"
    r"|as an? (?:ai|language model|artificial))",
    re.I,
)
# repetitions at an answer's end that make a loop, and the characters that they have together
_REPEATS: Final = 4
_LOOP_CHARS: Final = 48
# longest repeated unit, in characters
_LONGEST_UNIT: Final = 200


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat, and what its request asked of its form."""

    text: str
    finish_reason: str = "stop"
    # the model's own word that it refuses
    refusal: str = ""
    # name and arguments, as JSON, of each call
    calls: Sequence[tuple[str, str]] = ()
    # parameters of the tools that the request offers, by name
    tools: Mapping[str, Any] = {}
    # the request demands a call
    wants_call: bool = False
    # the request asks for JSON, and with this schema; None: with any
    wants_json: bool = False
    schema: Any = None


def exact_fault(answer: Answer) -> str:
    """Return the first fault of an answer: ``refusal``, ``length``, ``empty``, ``tool``, ``json``
    or ``loop``; empty: it has none that can be seen without knowing the right answer."""
    if answer.refusal or answer.finish_reason == "content_filter":
        return "refusal"
    if answer.finish_reason == "length":
        return "length"
    if answer.calls:
        return "tool" if any(_is_bad_call(*call, answer.tools) for call in answer.calls) else ""
    if answer.wants_call:
        return "tool"
    if not answer.text.strip():
        return "empty"
    if answer.wants_json:
        return "json" if _is_bad_json(answer.text, answer.schema) else ""
    if is_refusal(answer.text):
        return "refusal"
    return "loop" if is_loop(answer.text) else ""


def plain_text(text: str) -> str:
    """Return a text without the case, the spacing and the full stop that no comparison means."""
    return " ".join(text.casefold().split()).strip(" .")


def agree(one: Answer, other: Answer) -> bool:
    """Whether two answers say the same: the same calls, the same JSON, or the same words."""
    if one.calls or other.calls:
        return [_call(call) for call in one.calls] == [_call(call) for call in other.calls]
    return bool(_value(one.text) == _value(other.text))


def _call(call: tuple[str, str]) -> tuple[str, Any]:
    return call[0], _value(call[1] or "{}")


def _value(text: str) -> Any:
    """Return a text's JSON, and where it has none, its words."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return plain_text(text)


def is_refusal(text: str) -> bool:
    """Whether a text begins as refusals do."""
    return _REFUSAL.match(text.replace("\u2019", "'")) is not None


def is_loop(text: str) -> bool:
    """Whether a text ends in one unit, again and again."""
    text = text.rstrip()
    at = end = len(text) - 1
    least = end - min(_LONGEST_UNIT, len(text) // _REPEATS)
    # a unit ends as the text does
    while text and (at := text.rfind(text[end], least, at)) >= 0:
        unit = end - at
        if text.endswith(text[-unit:] * max(_REPEATS, -(-_LOOP_CHARS // unit))):
            return True
    return False


def _is_bad_json(text: str, schema: Any) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return True
    return bool(violation(value, schema))


def _is_bad_call(name: str, arguments: str, tools: Mapping[str, Any]) -> bool:
    return name not in tools or _is_bad_json(arguments or "{}", tools[name])
