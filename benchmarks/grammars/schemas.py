"""Random JSON schemas of rising difficulty, regular expressions and grammars, each with a check
that is independent of the generation of outputs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jsonschema

__all__ = ["GRAMMARS", "LEVELS", "PATTERNS", "Case", "matches_schema", "schema"]

# additions of each level to the levels before it
LEVELS: Final = {
    1: "flat objects of strings, numbers, enums and formats",
    2: "objects and arrays in each other, patterns, anyOf",
    3: "$ref and $defs, prefixItems, constants, numbers of places",
    4: "recursion, patternProperties, oneOf by a constant, allOf, counts of properties",
}
_NAMES: Final = ["name", "size", "kind", "tags", "when", "part", 'é "x"']

PATTERNS: Final = [
    r"[A-Z]{2}[0-9]{4}",
    r"(yes|no|maybe), because [a-z ]{5,40}\.",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"(ab?c|d[ef]+){2,5}",
    r"<(b|i)>[^<]{0,9}</(b|i)>",
]


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar, and a check of membership in its language."""

    source: str
    holds: Callable[[str], bool]


def _sum_holds(text: str) -> bool:
    if re.fullmatch(r"[0-9()+* ]+", text) is None:
        return False
    try:
        # the text has only digits, brackets, + and *
        return isinstance(eval(text, {"__builtins__": {}}), int)
    except SyntaxError:
        return False


def _pairs_hold(text: str) -> bool:
    rows = text.splitlines()
    return 1 <= len(rows) <= 4 and all(
        re.fullmatch(r"(id|name) = (\d{1,4}|\"[a-z]{1,6}\")", row) for row in rows
    )


def _balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth < 0 or letter not in "[]x":
            return False
    return depth == 0 and text != ""


# Lark first, then EBNF with ::=
GRAMMARS: Final = [
    Case(
        'start: term (" + " term){0,3}\nterm: factor ("*" factor){0,2}\n'
        'factor: NUMBER | "(" NUMBER "+" NUMBER ")"\nNUMBER: /[1-9][0-9]{0,3}/',
        _sum_holds,
    ),
    Case(
        'start: row ("\\n" row){0,3}\nrow: KEY " = " value\nKEY: "id" | "name"\n'
        'value: /[0-9]{1,4}/ | "\\"" /[a-z]{1,6}/ "\\""',
        _pairs_hold,
    ),
    Case('root ::= item item?\nitem ::= "[" inner? "]"\ninner ::= "x" | "[x]" | item', _balanced),
    Case(
        'root ::= ("a" | "b" "c"?) (", " ("a" | "b"))*  "."',
        lambda text: re.fullmatch(r"(a|bc?)(, [ab])*\.", text) is not None,
    ),
]


def matches_schema(value: str, against: Any) -> bool:
    """Whether a text is JSON that matches a schema."""
    # not "date": the checker knows no year 0, RFC 3339 does
    checker = jsonschema.FormatChecker(["ipv4"])
    try:
        jsonschema.validate(json.loads(value), against, format_checker=checker)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def schema(rng: random.Random, level: int = 2) -> Any:
    """Return a schema whose values cannot grow without bound; see ``LEVELS``."""
    if level < 4:
        made = _object(rng, level, 0)
        if level == 3:
            made = {"$defs": {"part": _object(rng, 1, 1)}, **made}
            made["properties"]["again"] = {"$ref": "#/$defs/part"}
        return made
    kind = rng.choice(["tree", "patterns", "cases", "both", "counts"])
    match kind:
        case "tree":
            node = {
                "type": "object",
                "properties": {
                    "value": _scalar(rng),
                    "below": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "below"],
                "additionalProperties": False,
            }
            return {"$ref": "#/$defs/node", "$defs": {"node": node}}
        case "patterns":
            return {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
                "patternProperties": {"^x[0-9]$": _scalar(rng)},
                "required": ["id"],
                "additionalProperties": False,
                "maxProperties": 3,
            }
        case "cases":
            return {"oneOf": [_tagged(rng, name) for name in ("circle", "square", "line")]}
        case "both":
            first, second = _scalar(rng), _scalar(rng)
            return {
                "allOf": [
                    {"type": "object", "properties": {"a": first}, "required": ["a"]},
                    {"type": "object", "properties": {"b": second}, "required": ["b"]},
                ],
                "maxProperties": 2,
            }
    return {
        "type": "object",
        "properties": {"only": _scalar(rng)},
        "required": ["only"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "minProperties": 1,
        "maxProperties": 2,
    }


def _tagged(rng: random.Random, name: str) -> Any:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, "size": _scalar(rng)},
        "required": ["kind", "size"],
        "additionalProperties": False,
    }


def _object(rng: random.Random, level: int, depth: int) -> Any:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, level, depth + 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }


def _scalar(rng: random.Random) -> Any:
    match rng.choice(["string", "integer", "number", "boolean", "enum", "format"]):
        case "string":
            return {"type": "string", "maxLength": rng.randint(3, 12)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 999)}
        case "number":
            return {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25}
        case "boolean":
            return {"type": ["boolean", "null"]}
        case "enum":
            return {"enum": ["red", "green", 3, None, {"a": 1}][: rng.randint(1, 5)]}
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}


def _value(rng: random.Random, level: int, depth: int) -> Any:
    kinds = ["scalar", "scalar"]
    if level >= 2:
        kinds.append("pattern")
        if depth < 3:
            kinds += ["object", "array", "anyOf"]
    if level >= 3:
        kinds += ["tuple", "const"]
    match rng.choice(kinds):
        case "pattern":
            return {"type": "string", "pattern": "^[A-Z][a-z]{2,6}( [0-9]{1,3})?$"}
        case "object":
            return _object(rng, level, depth)
        case "array":
            low = rng.randint(0, 2)
            items = _value(rng, level, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [_value(rng, level, depth + 1), _value(rng, level, depth + 1)]}
        case "tuple":
            return {
                "type": "array",
                "prefixItems": [_scalar(rng), _scalar(rng)],
                "items": False,
                "minItems": 2,
            }
        case "const":
            return {"const": rng.choice([0, "x", [1, "two"], {"a": None}])}
    return _scalar(rng)
