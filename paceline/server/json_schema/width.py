"""How much a JSON schema leaves open at one place of an output, which the compiler bounds.

The matcher follows every way in which the text so far can go on, side by side, in rows of items
(Earley's). Its library holds 2,000 items a row, and finds out in the middle of an answer that they
are too few. So they are counted here first: a property that may be left out takes 4, an array that
is one of several alternatives 4, or 6 if it may be empty. These were counted by trying
(``tests/server/bodies/test_structured.py`` tries them again) and are no more than the library
takes, so that no schema that can be followed is refused; one that slips through ends as a 400 later
(``engine.types.TOO_AMBIGUOUS``).

Called for schemas that ``json_schema`` has checked otherwise.
"""

from __future__ import annotations

from typing import Any, Final

from paceline.core.errors import InvalidRequestError

__all__ = ["MAX_ITEMS", "MAX_PATTERN_PROPERTIES", "check_width"]

MAX_ITEMS: Final = 2000
_PER_OPTIONAL: Final = 4
_PER_ARRAY: Final = 4
_PER_ARRAY_THAT_MAY_BE_EMPTY: Final = 6
# patterns of names in one schema: compiling takes time with their number's third power, a fifth of
# a second for so many and no end for 600
MAX_PATTERN_PROPERTIES: Final = 128
# deeper ones are not looked into
_MAX_DEPTH: Final = 100


def check_width(schema: Any, field: str) -> None:
    """Raises InvalidRequestError, naming the innermost place that leaves too much open."""
    walk = _Walk(schema, field)
    walk.width(schema, field, 0)


class _Walk:
    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        # of what references point at; 0 while it is being found out
        self._known: dict[str, int] = {}
        self._patterns = 0

    def width(self, schema: Any, where: str, depth: int) -> int:
        """Items of a row, at most, that texts of this schema take."""
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
        # one of these is written at a time
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
        # all of these may be meant until the text tells
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
        """Whether it says so by itself; a schema without a type is not counted."""
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
