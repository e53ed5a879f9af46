"""Checks that generation can enforce a JSON Schema. Every fault names its path.

The compiler refuses schemas too, but without a path, and it skips unknown keywords. Here each
keyword is enforced, an annotation, or an error; none is silently ignored.

``check_width`` counts the choices that an accepted schema leaves open at one point. The matcher
follows in parallel every way in which the text so far can go on, in rows of items (Earley's). Its
library holds 2,000 items a row, and fails in the middle of an answer if they are too few: an
optional property takes 4, an array that is one of several alternatives 4, or 6 if it may be empty.
These numbers were found by trial (``tests/server/protocol/test_structured.py`` repeats it) and are
no more than the library takes, so that no usable schema is refused; one that slips through ends as
a 400 later (``engine.types.TOO_AMBIGUOUS``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import show

__all__ = [
    "ANNOTATIONS",
    "FORMATS",
    "MAX_ITEMS",
    "MAX_PATTERN_PROPERTIES",
    "check_schema",
    "check_width",
    "with_refs",
]

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


MAX_ITEMS: Final = 2000
_PER_OPTIONAL: Final = 4
_PER_ARRAY: Final = 4
_PER_ARRAY_THAT_MAY_BE_EMPTY: Final = 6
# maximum patterns of names in one schema: compile time grows with the third power of their number:
# 0.2 s at this maximum, endless for 600
MAX_PATTERN_PROPERTIES: Final = 128
# deeper schemas are not counted
_MAX_DEPTH: Final = 100


def check_width(schema: Any, field: str) -> None:
    """Raise InvalidRequestError, naming the innermost point that leaves too many choices open."""
    walk = _Walk(schema, field)
    walk.width(schema, field, 0)


class _Walk:
    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        # width of each reference's target; 0 while it is being computed
        self._known: dict[str, int] = {}
        self._patterns = 0

    def width(self, schema: Any, where: str, depth: int) -> int:
        """Return the maximum items of a row that texts of this schema take."""
        if type(schema) is not dict or depth > _MAX_DEPTH:
            return 1
        own = self._optional(schema) * _PER_OPTIONAL + 1
        if self._may_be(schema, "array"):
            own += _PER_ARRAY if schema.get("minItems") else _PER_ARRAY_THAT_MAY_BE_EMPTY
        patterns: dict[str, Any] = schema.get("patternProperties", {})
        self._patterns += len(patterns)
        if self._patterns > MAX_PATTERN_PROPERTIES:
            raise InvalidRequestError(
                f"{where}/patternProperties: a schema may hold {MAX_PATTERN_PROPERTIES} patterns "
                f"of names, here are {self._patterns}",
                self._field,
            )
        # only one of these is written at a time
        inside = [
            self.width(each, f"{where}/{key}/{name}", depth + 1)
            for key in ("properties", "patternProperties")
            for name, each in schema.get(key, {}).items()
        ]
        inside += [
            self.width(schema[key], f"{where}/{key}", depth + 1)
            for key in ("items", "additionalProperties")
            if key in schema
        ]
        inside += [
            self.width(each, f"{where}/prefixItems/{index}", depth + 1)
            for index, each in enumerate(schema.get("prefixItems", ()))
        ]
        total = max([own, *inside])
        # any of these may match until the text decides
        for key in ("anyOf", "oneOf", "allOf"):
            for index, each in enumerate(schema.get(key, ())):
                total += self.width(each, f"{where}/{key}/{index}", depth + 1)
        if "$ref" in schema:
            total += self._referred(schema["$ref"], depth)
        if total > MAX_ITEMS:
            raise InvalidRequestError(
                f"{where} leaves {total} ways open at one place of the output, at most {MAX_ITEMS} "
                "can be followed (a property that is not required takes 4): name more properties "
                "in 'required', or offer fewer alternatives",
                self._field,
            )
        return total

    def _optional(self, schema: dict[str, Any]) -> int:
        properties: dict[str, Any] = schema.get("properties", {})
        return len(properties.keys() - set(schema.get("required", ())))

    def _may_be(self, schema: dict[str, Any], kind: str) -> bool:
        """Return whether the schema itself allows ``kind``; one without a type does not count."""
        types = schema.get("type", ())
        return types == kind or (type(types) is list and kind in types)

    def _referred(self, ref: str, depth: int) -> int:
        if ref not in self._known:
            self._known[ref] = 0
            target: Any = self._root
            for part in ref[1:].split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[int(part)] if type(target) is list else target[part]
            self._known[ref] = self.width(target, f"{self._field}{ref[1:]}", depth + 1)
        return self._known[ref]
