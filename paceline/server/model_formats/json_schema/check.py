"""Checks that generation can enforce a JSON Schema. Every fault names its path.

The compiler refuses schemas too, but without a path, and it skips unknown keywords. Here each
keyword is enforced, an annotation, or an error; none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.model_formats.json_schema.width import check_width

__all__ = ["ANNOTATIONS", "FORMATS", "check_schema", "with_refs"]

# keywords that hold one schema, a list of schemas, named schemas, or values
_ONE: Final = frozenset({"items", "additionalProperties"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset(
    (
        "type", "required", "minProperties", "maxProperties", "minItems", "maxItems", "const",
        "enum", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref",
    )
)  # fmt: skip
ANNOTATIONS: Final = frozenset(
    (
        "title", "description", "default", "examples", "example", "$schema", "$id", "$comment",
        "deprecated", "readOnly", "writeOnly", "discriminator",
    )
)  # fmt: skip
_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS: Final = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_MAX_SCHEMAS: Final = 20_000
# compile time grows in proportion to it: five seconds for a million
_MAX_MULTIPLE: Final = 10_000
_LOOKAROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")


def check_schema(schema: Any, field: str) -> None:
    """Raise InvalidRequestError, naming ``field`` and the path below it, for an unusable schema."""
    pending: list[tuple[Any, str]] = [(schema, field)]
    count = 0
    while pending:
        value, where = pending.pop()
        count += 1
        if count > _MAX_SCHEMAS:
            raise InvalidRequestError(
                f"{field} holds more than {_MAX_SCHEMAS} schemas inside each other", field
            )
        if value is False and where != field:
            continue
        if value is True:
            continue
        if type(value) is not dict:
            raise _fault(field, where, f"must be a schema, got {show(value)}")
        for key, item in value.items():
            pending += _below(key, item, f"{where}/{key}", field)
        if "$ref" in value:
            _check_ref(value["$ref"], schema, f"{where}/$ref", field)
    check_width(schema, field)


def with_refs(schema: Any, change: Callable[[str], str]) -> Any:
    """Return a checked schema with every reference changed. Values of ``const``, ``enum`` and
    annotations are not schemas, even if they look like one."""
    if type(schema) is not dict:
        return schema
    found: dict[str, Any] = {}
    for key, item in schema.items():
        if key == "$ref":
            item = change(item)
        elif key in _ONE:
            item = with_refs(item, change)
        elif key in _LISTS:
            item = [with_refs(each, change) for each in item]
        elif key in _NAMED:
            item = {name: with_refs(each, change) for name, each in item.items()}
        found[key] = item
    return found


def _fault(field: str, where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {message}", field)


def _below(key: str, item: Any, where: str, field: str) -> list[tuple[Any, str]]:
    """Check one keyword; return the schemas below it."""
    if key in _ONE:
        if key == "items" and type(item) is list:
            raise _fault(field, where, "is a list of schemas: write them as prefixItems")
        return [(item, where)]
    if key in _LISTS:
        if type(item) is not list or not item:
            raise _fault(field, where, f"must be a list of schemas, got {show(item)}")
        return [(each, f"{where}/{index}") for index, each in enumerate(item)]
    if key in _NAMED:
        if type(item) is not dict:
            raise _fault(field, where, f"must be an object of schemas, got {show(item)}")
        return [(each, f"{where}/{name}") for name, each in item.items()]
    if key in _VALUES:
        _check_value(key, item, where, field)
    elif key not in ANNOTATIONS and not (key.startswith("x-") and key != "x-guidance"):
        raise _fault(
            field, where, f"is not supported: generation cannot be held to the keyword {show(key)}"
        )
    return []


def _check_value(key: str, item: Any, where: str, field: str) -> None:
    if key == "type":
        names = item if type(item) is list else [item]
        if not names or any(type(n) is not str or n not in _TYPES for n in names):
            raise _fault(field, where, f"must be of {', '.join(_TYPES)}, got {show(item)}")
    elif key == "required":
        if type(item) is not list or any(type(name) is not str for name in item):
            raise _fault(field, where, f"must be a list of strings, got {show(item)}")
    elif key == "enum":
        if type(item) is not list or not item:
            raise _fault(field, where, f"must be a list of at least one value, got {show(item)}")
    elif key == "format":
        if item not in FORMATS:
            raise _fault(
                field, where, f"is not supported: {show(item)}; it may be {', '.join(FORMATS)}"
            )
    elif key == "pattern":
        if type(item) is not str:
            raise _fault(field, where, f"must be a string, got {show(item)}")
        if any(part in item for part in _LOOKAROUND):
            raise _fault(field, where, "looks ahead or behind, which is not supported")
    elif key.startswith(("min", "max", "exclusive", "multiple")):
        integral = not key.endswith(("imum", "Of"))
        if type(item) is not int and (integral or type(item) is not float):
            kind = "an integer" if integral else "a number"
            raise _fault(field, where, f"must be {kind}, got {show(item)}")
        if (integral and item < 0) or (key == "multipleOf" and item <= 0):
            raise _fault(field, where, f"is out of range: {show(item)}")
        if key == "multipleOf" and item > _MAX_MULTIPLE:
            raise _fault(field, where, f"may be {_MAX_MULTIPLE} at most, got {show(item)}")


def _check_ref(ref: Any, root: Any, where: str, field: str) -> None:
    if type(ref) is not str or not ref.startswith("#"):
        raise _fault(field, where, f"must point into this schema ('#/$defs/...'), got {show(ref)}")
    target: Any = root
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if type(target) is dict and part in target:
            target = target[part]
        elif type(target) is list and part.isdecimal() and int(part[:9]) < len(target):
            target = target[int(part[:9])]
        else:
            raise _fault(field, where, f"points at nothing: {show(ref)}")
