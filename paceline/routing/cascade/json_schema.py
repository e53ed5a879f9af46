"""Check of a value against the part of JSON Schema that callers' formats use.

Keywords: ``type``, ``enum``, ``const``, ``properties``, ``required``, ``additionalProperties``,
``items``, ``minItems``, ``maxItems``, ``minLength``, ``maxLength``, ``minimum``, ``maximum``,
``anyOf``. Others are ignored, so a value that violates one of those counts as good, and so is a
schema that is malformed: the engine reports that to the caller, if it reads schemas at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["violation"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    # not by float(): an integer may exceed its range
    "integer": lambda value: _is_number(value) and value % 1 == 0,
}
# keyword, the type it is about, and whether it holds
_BOUNDS: Final[Mapping[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "minItems": ("array", lambda value, bound: len(value) >= bound),
    "maxItems": ("array", lambda value, bound: len(value) <= bound),
    "minLength": ("string", lambda value, bound: len(value) >= bound),
    "maxLength": ("string", lambda value, bound: len(value) <= bound),
    "minimum": ("number", lambda value, bound: value >= bound),
    "maximum": ("number", lambda value, bound: value <= bound),
}


def violation(value: Any, schema: Any) -> str:
    """Return the first violation of a schema by a value; empty: none is known."""
    try:
        return _violation(value, schema, "$")
    except (TypeError, AttributeError, RecursionError):
        # a keyword has a value of a wrong type, or the schema is too deep
        return ""


def _violation(value: Any, schema: Any, where: str) -> str:
    if schema is False:
        return f"{where} is not allowed"
    if not isinstance(schema, Mapping):
        return ""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES.get(kind, lambda _: True)(value) for kind in kinds):
        return f"{where} is not of type {' or '.join(kinds)}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return f"{where} is none of the enum"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{where} is not the constant"
    for name, (kind, holds) in _BOUNDS.items():
        if name in schema and _TYPES[kind](value) and not holds(value, schema[name]):
            return f"{where} violates {name} {schema[name]}"
    branches = schema.get("anyOf")
    if branches and all(_violation(value, each, where) for each in branches):
        return f"{where} fits no branch of anyOf"
    if isinstance(value, dict):
        return _object_violation(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        found = (_violation(v, schema["items"], f"{where}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), "")
    return ""


def _object_violation(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str:
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{where} lacks {missing[0]!r}"
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = (_violation(v, known.get(name, rest), f"{where}.{name}") for name, v in value.items())
    return next(filter(None, found), "")


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, where true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)
