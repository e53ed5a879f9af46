"""What a tool format is, and what all of them share: reading one call as it is written.

A format says how a model writes calls into its text. Adding one is adding a file with a
``ToolFormat`` and a line in ``__init__``. Parsers see text in any pieces, take time in proportion
to it, and never evaluate it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from paceline.server.json_schema.check import with_refs

__all__ = [
    "CallDelta",
    "CallReader",
    "Piece",
    "ToolFormat",
    "ToolParser",
    "call_schema",
    "held_back",
]

_SPACE: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call."""

    # which call of the output, from 0
    index: int
    # on the first piece of a call
    name: str | None
    # JSON text, to be appended to what came before
    arguments: str


# text for the caller, or a piece of a call
Piece = str | CallDelta


class ToolParser(Protocol):
    """One output being read."""

    def push(self, text: str) -> list[Piece]:
        """Take in more of the output."""
        ...

    def finish(self) -> list[Piece]:
        """The output is over: what was held back."""
        ...


class ToolFormat(Protocol):
    """How one family of models writes calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """A chat template that holds one of these is of this family."""
        ...

    @property
    def arguments_key(self) -> str:
        """What a call's arguments are called in the model's text."""
        ...

    def parser(self, *, forced: bool) -> ToolParser:
        """``forced``: the output was held to ``rule`` and is calls from the first character on."""
        ...

    def rule(self, *, parallel: bool) -> str:
        """Lark rules ``calls`` and below: one call (or several, with ``parallel``) of ``call``,
        which is the rule of a call's JSON object with ``name`` and ``arguments_key``."""
        ...


# with these a schema may know of properties that it does not list itself
_SAYS_MORE: Final = frozenset(
    {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


def call_schema(tool: dict[str, Any], arguments_key: str, at: str) -> dict[str, Any]:
    """The schema of one call's object; ``at`` is where it will stand in the whole schema.

    Arguments that are listed are all there are, unless the schema says otherwise: SDKs drop
    ``additionalProperties: false`` on the way, and callers pass arguments on by name.
    ``parameters`` have been checked (``check_schema``).
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if not parameters or ("properties" in parameters and not _SAYS_MORE & parameters.keys()):
        parameters = {**parameters, "additionalProperties": False}
    # references still hold where it stands then
    moved = with_refs(parameters, lambda ref: f"{at}/properties/{arguments_key}{ref[1:]}")
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments_key: {"type": "object", **moved},
        },
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0


class CallReader:
    """Reads one ``{"name": ..., "arguments": {...}}``, character by character.

    Arguments come out as they are written, once the name is known. Feed it until ``done`` or
    ``broken``; what it read is ``text``.
    """

    def __init__(self, index: int, name: str | None = None) -> None:
        """With ``name``, what is read is the arguments alone."""
        self.done = False
        # not such an object after all, found out before anything of it was told
        self.broken = False
        self.named = False
        self._index = index
        self._name = name
        self._bare = name is not None
        self._chars: list[str] = []
        self._depth = 0
        self._quoted = False
        self._escaped = False
        # the member being read at depth 1: its key and where its value begins, in characters
        self._key: str | None = None
        self._start = 0
        self._arguments_from: int | None = None
        self._arguments_to: int | None = None
        self._told = 0
        if self._bare:
            self._arguments_from = 0

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def take(self, text: str) -> str:
        """Read on; what is left of ``text`` once the call is over."""
        for position, char in enumerate(text, 1):
            self.feed(char)
            if self.done or self.broken:
                return text[position:]
        return ""

    def feed(self, char: str) -> None:
        self._chars.append(char)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
            return
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                self.broken = char != "{"
                self._start = len(self._chars)
        elif char in "}]":
            if self._depth == 1:
                self._end_of_member(len(self._chars) - 1)
                self.done = True
            self._depth -= 1
        elif self._depth == 1 and char == ":" and self._key is None:
            self._begin_value()
        elif self._depth == 1 and char == ",":
            self._end_of_member(len(self._chars) - 1)
            self._start = len(self._chars)
        elif self._depth == 0 and char not in _SPACE:
            self.broken = True
        elif char in _SPACE and self._arguments_from == len(self._chars) - 1:
            # white space before the value is not part of it
            self._arguments_from += 1
        if self.done and not self.named and (self._name is None or self._arguments_from is None):
            # no name: some other object
            self.broken = self._name is None

    def deltas(self) -> Iterator[CallDelta]:
        """What is new since the last call."""
        if self._name is None or self.broken:
            return
        if not self.named:
            if self._arguments_from is None and not self.done:
                return
            self.named = True
            yield CallDelta(self._index, self._name, "")
        if self._arguments_from is None:
            if self.done and not self._told:
                self._told = 1
                yield CallDelta(self._index, None, "{}")
            return
        end = len(self._chars) if self._arguments_to is None else self._arguments_to
        if self._bare and self.done:
            end = len(self._chars)
        begin = self._arguments_from + self._told
        if end > begin:
            self._told += end - begin
            yield CallDelta(self._index, None, "".join(self._chars[begin:end]))

    def _begin_value(self) -> None:
        key = _string("".join(self._chars[self._start : -1]))
        self._key = "" if key is None else key
        self._start = len(self._chars)
        if self._key in ("arguments", "parameters") and self._arguments_from is None:
            self._arguments_from = self._start

    def _end_of_member(self, end: int) -> None:
        if self._bare:
            return
        if self._key == "name" and self._name is None:
            self._name = _string("".join(self._chars[self._start : end]))
            self.broken = not self._name
        elif self._key in ("arguments", "parameters") and self._arguments_to is None:
            self._arguments_to = end
        self._key = None


def _string(text: str) -> str | None:
    """The string that ``text`` is in JSON, None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
