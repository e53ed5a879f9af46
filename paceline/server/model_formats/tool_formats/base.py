"""The interface of tool formats.

A format says how a model writes calls into its text. To add one, add a file with a ``ToolFormat``
and a line in ``__init__``. Parsers get text in pieces of any size, take time in proportion to it,
and never evaluate it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from paceline.server.model_formats.json_schema.check import with_refs

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
    """A piece of a call; a whole call unless a grammar forces the output to be calls."""

    # index of the call in the output, from 0
    index: int
    # set on the first piece of a call
    name: str | None
    # JSON text, to be appended to earlier pieces
    arguments: str
    # the id that the model gave it; empty: none
    id: str = ""


# text for the caller, or a piece of a call
Piece = str | CallDelta


class ToolParser(Protocol):
    """Reads one output."""

    def push(self, text: str) -> list[Piece]:
        """Take in more of the output; return the pieces it completes."""

    def finish(self) -> list[Piece]:
        """Return the pieces held back, as the output has ended."""


class ToolFormat(Protocol):
    """The way in which one family of models writes calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that identify a chat template of this family."""

    @property
    def arguments_key(self) -> str:
        """The key of a call's arguments in the model's text."""

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        """Return a parser of output that may be text and calls of ``names``; ``held``: the output
        follows ``rule``, or is an answer in JSON."""

    def rule(self, *, parallel: bool) -> str:
        """Return the Lark rule ``calls`` and those below: one ``call`` (or several, with
        ``parallel``); ``call`` is the rule of a JSON object with ``name`` and ``arguments_key``."""


# keywords with which a schema may allow properties that it does not list itself
_SAYS_MORE: Final = frozenset(
    {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


def call_schema(tool: dict[str, Any], arguments_key: str, at: str) -> dict[str, Any]:
    """Return the schema of one call's object; ``at`` is its future path in the whole schema.

    Only the listed arguments are allowed, unless the schema says otherwise: SDKs drop
    ``additionalProperties: false`` on the way, and callers pass arguments on by name.
    ``parameters`` have been checked (``check_schema``).
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if not parameters or ("properties" in parameters and not _SAYS_MORE & parameters.keys()):
        parameters = {**parameters, "additionalProperties": False}
    # keeps references valid at the new path
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
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
