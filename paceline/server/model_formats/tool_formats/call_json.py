"""The JSON of a call: its end and its content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["BLANK", "JsonEnd", "Written", "arguments_of", "call_of"]

BLANK: Final = " \t\r\n"
# maximum levels of quoting around the arguments
_MOST_QUOTES: Final = 4
_QUOTED: Final = re.compile(r'["\\]')
# brackets, quotes, and characters that JSON has only in strings; the letters are those of its three
# words and of "E"
_PLAIN: Final = re.compile(r"[^ \t\r\n:,0-9+\-.truefalsnE]")
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ESCAPE_OR_CONTROL: Final = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_CONTROLS: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_INVALID: Final = object()
# the members of a call's object
_ARGUMENTS: Final = ("arguments", "parameters")
_KNOWN: Final = frozenset({"name", "id", "type", *_ARGUMENTS})
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class JsonEnd:
    """Finds the end of an object, or a string, in a text that grows.

    Args:
        start: index of its first character.
    """

    def __init__(self, start: int) -> None:
        # index up to which the text was read, and at last the end
        self.place = start
        self._depth = 0
        self._quoted = False

    def look(self, text: str) -> bool | None:
        """Return whether it has ended; None if it is not JSON."""
        while found := (_QUOTED if self._quoted else _PLAIN).search(text, self.place):
            char = found[0]
            if char == "\\":
                if not self._quoted:
                    return None
                if found.end() == len(text):
                    # the escaped character has not arrived yet
                    self.place = found.start()
                    return False
                self.place = found.end() + 1
                continue
            self.place = found.end()
            if char == '"':
                self._quoted = not self._quoted
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                return None
            if not self._depth and not self._quoted:
                return True
        self.place = len(text)
        return False


class Written(NamedTuple):
    """The content of a call's object."""

    # empty: the object is not a call
    name: str
    # JSON text of an object
    arguments: str
    # empty: not given
    id: str = ""


def call_of(text: str) -> Written | None:
    """Return the call that the JSON ``text`` holds; None if it is not JSON."""
    text = _repaired(text)
    try:
        members: Mapping[str, msgspec.Raw] = _members(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    name, call_id = (_decoded(bytes(members.get(key, b"null"))) for key in ("name", "id"))
    given = [bytes(members[key]).decode() for key in _ARGUMENTS if key in members]
    arguments = arguments_of(next((text for text in given if text != "null"), ""))
    # without arguments, an object with more than a name is data
    is_data = not given and not members.keys() <= _KNOWN
    if not isinstance(name, str) or arguments is None or is_data:
        return Written("", "")
    return Written(name, arguments, call_id if isinstance(call_id, str) else "")


def arguments_of(text: str) -> str | None:
    """Return arguments as the JSON text of an object, whether written as one, as a string that
    holds one, or left out; None if they are anything else."""
    for _ in range(_MOST_QUOTES):
        text = text.strip()
        if text in ("", "null"):
            return "{}"
        text = _repaired(text)
        value = _decoded(text)
        if isinstance(value, dict):
            return text
        if not isinstance(value, str):
            return None
        text = value
    return None


def _decoded(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return _INVALID


def _repaired(text: str) -> str:
    """Escape line breaks and other control characters in the text's strings."""
    if _decoded(text) is not _INVALID:
        return text
    return _STRING.sub(lambda found: _ESCAPE_OR_CONTROL.sub(_escaped, found[0]), text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0][-1]
    return found[0] if char >= " " else _CONTROLS.get(char, f"\\u{ord(char):04x}")
