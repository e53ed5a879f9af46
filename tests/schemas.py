"""Random JSON schemas of rising difficulty, for tests of what is generated."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["schema"]


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of rising difficulty, whose values cannot grow without bound."""
    kinds = ["string", "integer", "enum", "boolean", "number", "format", "pattern"]
    if depth < 2:
        kinds += ["object", "array", "anyOf", "object"]
    kind = rng.choice(kinds) if depth else "object"
    match kind:
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
        case "format":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
        case "pattern":
            return {"type": "string", "pattern": "^[A-Z][a-z]{2,6}( [0-9]{1,3})?$"}
        case "array":
            low = rng.randint(0, 2)
            items = schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    names = ["name", "size", "kind", "tags", "when", "part", 'é "x"']
    names = rng.sample(names, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }
