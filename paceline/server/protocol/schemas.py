"""Small JSON schemas that larger ones are built from."""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "ANYTHING",
    "BOOLEAN",
    "INTEGER",
    "NULL",
    "OBJECT",
    "PREDICTION",
    "STRING",
    "Schema",
    "array",
    "bounded",
    "closed",
    "integer",
    "nullable",
    "number",
    "record",
    "ref",
    "string",
]

Schema = dict[str, Any]

ANYTHING: Final[Schema] = {}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
INTEGER: Final[Schema] = {"type": "integer"}
OBJECT: Final[Schema] = {"type": "object"}
NULL: Final[Schema] = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def string(*values: str, low: int = 0, high: int | None = None) -> Schema:
    """One of ``values``, or any string of ``low`` to ``high`` characters."""
    if values:
        return {"type": "string", "enum": list(values)}
    limits = {"minLength": low or None, "maxLength": high}
    return STRING | {key: value for key, value in limits.items() if value is not None}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, *, above: bool = False) -> Schema:
    """A number from ``low``, excluded if ``above``, to ``high``."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    found: Schema = {"type": "array", "items": items}
    if low:
        found["minItems"] = low
    return found if high is None else found | {"maxItems": high}


def bounded(schema: Schema, description: str) -> Schema:
    """Describe in words a limit that ``schema`` does not express."""
    return schema | {"description": description}


def nullable(schema: Schema) -> Schema:
    """Allow null: in requests it counts as absent."""
    if not schema or schema == NULL or "null" in schema.get("type", ()):
        return schema
    if type(schema.get("type")) is str and "enum" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, NULL]}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these properties, and possibly others."""
    found: Schema = {"type": "object", "properties": required | (optional or {})}
    return found | {"required": list(required)} if required else found


def closed(schema: Schema) -> Schema:
    """Forbid other properties of an object."""
    return schema | {"additionalProperties": False}


# the caller's prediction of most of a chat's answer
PREDICTION: Final[Schema] = bounded(
    record(
        {
            "type": string("content"),
            "content": {"anyOf": [STRING, array(record({"type": string("text"), "text": STRING}))]},
        }
    ),
    "most of the answer, as expected: it is verified several tokens at a time",
)
