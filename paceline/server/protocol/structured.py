"""``response_format`` and ``structured_outputs``: the form that the output must have.

::

    response_format     {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema"}}
    structured_outputs  one of {"json"} {"regex"} {"choice"} {"grammar"} {"json_object": true}

Both set the same thing, so a request may use one of them. Meanings are vLLM's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from paceline.core.grammar import Grammar
from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.model_formats.json_schema.check import check_schema
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    anything,
    array,
    boolean,
    ignored,
    mapping,
    nested,
    string,
    unread,
)
from paceline.server.protocol.schemas import Schema

__all__ = [
    "RESPONSE_FORMAT",
    "STRUCTURED_KINDS",
    "STRUCTURED_OUTPUTS",
    "StructuredOutputs",
    "format_schema",
    "json_grammar",
    "parse_grammar",
    "parse_structured",
    "schema_text",
]

_MAX_CHOICES: Final = 1024
# maximum characters of EBNF; the translator is slower than the compiler
_MAX_EBNF: Final = 1 << 14
STRUCTURED_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
# white space between parts of JSON: enough to indent, too little to fill an answer with
_WHITESPACE: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_NO_WHITESPACE: Final = {"whitespace_flexible": False}
_OBJECT: Final = {"type": "object"}
_FORMAT_NAMES: Final = frozenset({"type", "json_schema"})
# name and description of a schema inform the caller; a schema is always enforced strictly
_SPEC_NAMES: Final = frozenset({"schema", "name", "description", "strict"})


def _unread_format(value: dict[str, Any]) -> list[str]:
    spec = value.get("json_schema")
    inside = unread(spec, _SPEC_NAMES, ".json_schema") if type(spec) is dict else []
    return unread(value, _FORMAT_NAMES) + inside


RESPONSE_FORMAT: Final = replace(
    mapping(schemas.ref("ResponseFormat"), note="see [structured output](#structured-output)"),
    unread=_unread_format,
)


def format_schema() -> Schema:
    """Return the schema of ``response_format``."""
    spec = schemas.record({"schema": {"type": ["object", "boolean"]}})
    return {
        "anyOf": [
            schemas.record({"type": schemas.string("text", "json_object")}),
            schemas.record({"type": schemas.string("json_schema"), "json_schema": spec}),
        ]
    }


class StructuredOutputs(Body):
    """The object of that name; ``parse_structured`` refuses unknown keys."""

    json = anything({"type": ["object", "string", "boolean"]})
    regex = string(1)
    choice = array(schemas.array(schemas.string(low=1), 1, _MAX_CHOICES))
    grammar = string(1)
    json_object = boolean()
    disable_any_whitespace = boolean()
    # vLLM's switch between its own backends
    disable_fallback = ignored()


STRUCTURED_OUTPUTS: Final = nested(
    StructuredOutputs,
    schemas.ref("StructuredOutputs"),
    note="see [structured output](#structured-output)",
    # other servers have each kind as a separate field
    prefixed=False,
)


def parse_structured(
    response_format: dict[str, Any] | None, options: StructuredOutputs | None
) -> Grammar | None:
    """Return the requested grammar; None: no constraint. Raises InvalidRequestError."""
    wanted = _response_format(response_format)
    if options is None:
        return wanted
    given = _structured_outputs(options)
    if given is not None and wanted is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the output must look like: "
            "give one of them",
            "structured_outputs",
        )
    return given or wanted


def json_grammar(schema: Any, field: str, *, compact: bool = False) -> Grammar:
    """Check a schema and return its grammar."""
    check_schema(schema, field)
    return Grammar("json_schema", schema_text(schema, compact=compact), field)


def schema_text(schema: Any, *, compact: bool = False) -> str:
    """Return a checked schema in the compiler's form, properties in the order given."""
    if schema is True:
        schema = {}
    schema = {**schema, "x-guidance": _NO_WHITESPACE if compact else _WHITESPACE}
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _response_format(value: dict[str, Any] | None) -> Grammar | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(_OBJECT, "response_format")
    if kind != "json_schema":
        raise InvalidRequestError(
            f"response_format.type must be text, json_object or json_schema, got {show(kind)}",
            "response_format",
        )
    spec = value.get("json_schema")
    if type(spec) is not dict or "schema" not in spec:
        raise InvalidRequestError(
            "response_format.json_schema must be an object with a schema", "response_format"
        )
    return json_grammar(spec["schema"], "response_format.json_schema.schema")


def _structured_outputs(options: StructuredOutputs) -> Grammar | None:
    if options.ignored_fields:
        unknown = (name.replace("structured_outputs.", "", 1) for name in options.ignored_fields)
        raise InvalidRequestError(
            f"structured_outputs has {', '.join(unknown)}, which is not served; it "
            f"may hold one of {', '.join(STRUCTURED_KINDS)}, and disable_any_whitespace",
            "structured_outputs",
        )
    given = [kind for kind in STRUCTURED_KINDS if getattr(options, kind) is not None]
    if not options.json_object:
        given.remove("json_object")
    compact = options.disable_any_whitespace
    if len(given) > 1:
        raise InvalidRequestError(
            f"structured_outputs holds {' and '.join(given)}: give one of them",
            "structured_outputs",
        )
    if compact and given not in (["json"], ["json_object"]):
        raise InvalidRequestError(
            "structured_outputs.disable_any_whitespace goes with json or json_object",
            "structured_outputs",
        )
    if not given:
        return None
    kind, field = given[0], f"structured_outputs.{given[0]}"
    if kind == "json":
        return json_grammar(_schema(options.json, field), field, compact=compact)
    if kind == "json_object":
        return json_grammar(_OBJECT, field, compact=compact)
    if kind == "regex":
        return Grammar("regex", options.regex or "", field)
    if kind == "choice":
        return _choice(options.choice or [], field)
    return parse_grammar(options.grammar or "", field)


def _schema(value: Any, field: str) -> Any:
    """Return a schema given as JSON or as JSON text."""
    if type(value) is not str:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is not valid JSON: {error}", field) from None


def _choice(values: list[Any], field: str) -> Grammar:
    if not values or any(type(value) is not str or not value for value in values):
        raise InvalidRequestError(f"{field} must be a list of non-empty strings", field)
    if len(values) > _MAX_CHOICES:
        raise InvalidRequestError(
            f"{field} may hold {_MAX_CHOICES} strings, got {len(values)}", field
        )
    return Grammar("lark", "start: " + " | ".join(json.dumps(v) for v in values), field)


def parse_grammar(text: str, field: str) -> Grammar:
    """Return Lark unchanged, and EBNF with ``::=`` (llama.cpp, xgrammar) translated."""
    if "::=" not in text:
        return Grammar("lark", text, field)
    if len(text) > _MAX_EBNF:
        raise InvalidRequestError(
            f"{field}: EBNF may have {_MAX_EBNF} characters, got {len(text)}", field
        )
    # imported on first use: most servers never need it
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    except Exception as error:
        # the translator raises bare exceptions, and may exceed the recursion limit
        raise InvalidRequestError(f"{field} is not valid EBNF: {error!s:.200}", field) from None
    return Grammar("lark", lark, field)
