"""Counts the choices that a JSON schema leaves open at one point, which the compiler limits.

The matcher follows in parallel every way in which the text so far can go on, in rows of items
(Earley's). Its library holds 2,000 items a row, and fails in the middle of an answer if they are
too few. So they are counted here first: an optional property takes 4, an array that is one of
several alternatives 4, or 6 if it may be empty. These numbers were found by trial
(``tests/server/protocol/test_structured.py`` repeats it) and are no more than the library takes, so
that no usable schema is refused; one that slips through ends as a 400 later
(``engine.types.TOO_AMBIGUOUS``).

Called for schemas that ``json_schema.check`` accepts.
"""

from __future__ import annotations

from typing import Any, Final

from paceline.errors import InvalidRequestError

__all__ = ["MAX_ITEMS", "MAX_PATTERN_PROPERTIES", "check_width"]

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
