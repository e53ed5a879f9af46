"""``tools`` and ``tool_choice``: their request fields, and the calls in the output.

::

    none       tools are shown to the model, its output is text
    auto       text is searched for calls in the model's format
    required   a grammar restricts the output to one or more calls
    named      a grammar restricts the output to one call of that tool
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, replace
from string import ascii_letters, digits
from typing import Any, Final

from paceline.core.grammar import Grammar
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_array, show
from paceline.server.model_formats.json_schema.check import check_schema
from paceline.server.model_formats.tool_formats import (
    ForcedCalls,
    Piece,
    ToolFormat,
    ToolParser,
    call_schema,
)
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import anything, boolean, described
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import Schema
from paceline.server.protocol.structured import schema_text

__all__ = [
    "TOOL_NAME",
    "CallCollector",
    "ToolFields",
    "ToolPlan",
    "parse_tools",
    "tool_schema",
    "tools_message",
]

_MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
TOOL_NAME: Final[Schema] = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How a request uses tools."""

    tools: list[dict[str, Any]]
    # "none", "auto", "required" or "named"
    choice: str
    parallel: bool
    format: ToolFormat
    # the tool's name if choice is "named"
    name: str | None = None
    # calls get ids of nine letters and digits
    short_ids: bool = False

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def calls(self) -> bool:
        """Whether the output may hold calls."""
        return self.choice != "none"

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the output. ``answer`` is the grammar of a text answer, if the
        request has one. Raises InvalidRequestError if both cannot be combined."""
        if not self.calls or (answer is None and not self.forced):
            return answer
        if answer is not None and self.forced and answer.field.startswith("response_format"):
            # response_format constrains text, and forced calls leave no text
            answer = None
        if answer is not None and (self.forced or answer.kind != "json_schema"):
            raise InvalidRequestError(
                f"{answer.field} cannot go with tool_choice {self.name or self.choice!r}: both say "
                "what the whole output is",
                "tool_choice",
            )
        tools = [t for t in self.tools if self.name in (None, t["function"]["name"])]
        for index, tool in enumerate(tools):
            parameters = tool["function"].get("parameters")
            if parameters is not None:
                check_schema(parameters, f"tools[{index}].function.parameters")
        key = self.format.arguments_key
        schemas = [call_schema(t, key, f"#/anyOf/{i}") for i, t in enumerate(tools)]
        parallel = self.parallel and self.choice != "named"
        start = "calls" if answer is None else "calls | answer"
        source = (
            f"start: {start}\n{self.format.rule(parallel=parallel)}"
            f"call: %json {schema_text({'anyOf': schemas}, compact=True)}\n"
        )
        if answer is not None:
            source += f"answer: %json {answer.source}\n"
        return Grammar("lark", source, "tools")

    def collector(self, *, held: bool = False) -> CallCollector:
        """Return a collector for one choice; ``held``: its output follows ``grammar``."""
        names = [tool["function"]["name"] for tool in self.tools]
        parser = ForcedCalls() if self.forced else self.format.parser(names, held=held)
        return CallCollector(parser, parallel=self.parallel, short_ids=self.short_ids)

    def finish_reason(self, reason: str | None, *, called: bool) -> str | None:
        """Return OpenAI's reason: a named call ends with "stop", as the caller expected it."""
        return "tool_calls" if called and reason == "stop" and self.choice != "named" else reason


def tool_schema() -> Schema:
    """Return the schema of an entry of ``tools``."""
    optional = {"description": schemas.STRING, "parameters": schemas.OBJECT}
    function = schemas.record(
        {"name": TOOL_NAME}, {name: schemas.nullable(s) for name, s in optional.items()}
    )
    return schemas.record({"function": function}, {"type": schemas.string("function")})


def _checked(value: Any, _name: str, _rules: RequestRules) -> list[dict[str, Any]]:
    """Parse tool definitions as templates print them. Schemas are checked when enforced."""
    tools = check_array(value, "tools")
    if len(tools) > _MAX_TOOLS:
        raise InvalidRequestError(f"tools may hold {_MAX_TOOLS} tools, got {len(tools)}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if type(tool) is dict else None
        if (
            type(function) is not dict
            or type(function.get("name")) is not str
            or tool.get("type", "function") != "function"
        ):
            raise InvalidRequestError(
                f"tools[{index}] must be an object with type 'function' and function.name, "
                f"got {show(tool)}",
                "tools",
            )
        name = function["name"]
        if not _NAME.fullmatch(name) or name in seen:
            raise InvalidRequestError(
                f"tools[{index}].function.name must be 1 to 128 letters, digits and _.:/- and its "
                f"own, got {show(name)}",
                "tools",
            )
        seen.add(name)
        description = function.get("description")
        if description is not None and type(description) is not str:
            raise InvalidRequestError(
                f"tools[{index}].function.description must be a string, got {show(description)}",
                "tools",
            )
        parameters = function.get("parameters")
        if parameters is not None and type(parameters) is not dict:
            raise InvalidRequestError(
                f"tools[{index}].function.parameters must be a schema, got {show(parameters)}",
                "tools",
            )
    return tools


class ToolFields(Body):
    """The fields for tools and their use."""

    tools = described(
        _checked,
        schemas.array(schemas.ref("Tool"), 0, _MAX_TOOLS),
        note="see [tools](#tools)",
    )
    tool_choice = anything(
        {
            "anyOf": [
                schemas.string(*_CHOICES),
                schemas.record(
                    {
                        "type": schemas.string("function"),
                        "function": schemas.record({"name": schemas.STRING}),
                    }
                ),
            ]
        },
        note="see [tools](#tools)",
    )
    parallel_tool_calls = boolean(True)


def parse_tools(
    body: ToolFields, tool_format: ToolFormat, *, short_ids: bool = False
) -> ToolPlan | None:
    """Return how to use tools; None without any. Raises InvalidRequestError."""
    tools, choice = body.tools, body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequestError(f"tool_choice={show(choice)} needs tools", "tool_choice")
        return None
    plan = ToolPlan(
        tools=tools,
        choice="auto",
        parallel=body.parallel_tool_calls,
        format=tool_format,
        short_ids=short_ids,
    )
    if choice is None:
        return plan
    if choice in _CHOICES:
        return replace(plan, choice=choice)
    function = choice.get("function") if type(choice) is dict else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str or choice.get("type") != "function":
        raise InvalidRequestError(
            "tool_choice must be none, auto, required or an object with type 'function' and "
            f"function.name, got {show(choice)}",
            "tool_choice",
        )
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {show(name)}; the tools are {', '.join(names[:16])}",
            "tool_choice",
        )
    return replace(plan, choice="named", name=name)


@dataclass(slots=True)
class Call:
    """One call, complete when the output is complete."""

    name: str
    id: str
    arguments: str = ""


class CallCollector:
    """Collects the calls of one choice while its text streams. Without ``parallel`` only the first.

    Args:
        short_ids: ids have nine letters and digits.
    """

    def __init__(self, parser: ToolParser, *, parallel: bool, short_ids: bool = False) -> None:
        self._parser = parser
        self._parallel = parallel
        self._short_ids = short_ids
        self.calls: list[Call] = []

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """Return the pieces that more output adds, in order; ``last``: the output is complete."""
        pieces: list[Piece] = self._parser.push(text) if text else []
        if last:
            pieces += self._parser.finish()
        released: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, str):
                if piece.index and not self._parallel:
                    continue
                if piece.name is not None:
                    self.calls.append(Call(piece.name, self._id(piece.id)))
                self.calls[piece.index].arguments += piece.arguments
            released.append(piece)
        return released

    def _id(self, given: str) -> str:
        """Return the model's own id, unless another call has it, or a new one."""
        if given and all(call.id != given for call in self.calls):
            return given
        if self._short_ids:
            return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def tools_message(tools: list[dict[str, Any]]) -> str:
    """Return the tools as text, for a chat template that cannot show them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to help with the request. They are, one JSON object a line, in "
        f"<tools></tools>:\n<tools>\n{listed}\n</tools>\nTo call one, write a JSON object with its "
        'name and arguments:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
