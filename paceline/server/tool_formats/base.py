"""What a tool format is.

A format says how a model writes calls into its text. Adding one is adding a file with a
``ToolFormat`` and a line in ``__init__``. Parsers see text in any pieces, take time in proportion
to it, and never evaluate it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from paceline.server.json_schema.check import with_refs

__all__ = [
    "CallDelta",
    "Piece",
    "ToolFormat",
    "ToolParser",
    "call_schema",
    "held_back",
]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call: all of it, unless the output was held to calls."""

    # which call of the output, from 0
    index: int
    # on the first piece of a call
    name: str | None
    # JSON text, to be appended to what came before
    arguments: str
    # that the model gave it; empty: none
    id: str = ""


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

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        """Of output that may be text and calls of ``names``; ``held``: to ``rule``, or to an answer
        in JSON."""
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
