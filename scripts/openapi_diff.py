"""What another checkout's /openapi.json says differently; nothing, and it exits with 0.

    python scripts/openapi_diff.py [--types] CHECKOUT

Each tree is asked in a process of its own. The order of keys does not count, nor that of lists
whose order means nothing (``required``, ``enum``, ``tags``), nor whether null is said twice.
``--types`` leaves out the descriptions, which are for people.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_PRINT: Final = """
import json
from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
client = null_client(NullBackend(vocab_size=512, max_model_len=512), model="null-model")
print(json.dumps(create_app(client, ServerConfig()).openapi()))
"""
_NULL: Final = {"type": "null"}
_SETS: Final = ("required", "enum", "tags")
# whose keys are names
_NAMED: Final = ("properties", "schemas", "patternProperties", "$defs")
_ABSENT: Final = "(absent)"


def document_of(checkout: Path) -> dict[str, Any]:
    """The document of an app over the null backend."""
    program = "import asyncio\n" + "async def main():\n" + _PRINT.replace("\n", "\n    ")
    found: dict[str, Any] = json.loads(
        subprocess.run(
            [sys.executable, "-c", program + "\nasyncio.run(main())"],
            cwd=checkout,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    )
    return found


def meaning(value: Any, *, descriptions: bool = True, named: bool = False) -> Any:
    """A part of a document without what says nothing.

    Args:
        named: its keys are names of properties or schemas, not words of the format.
    """
    if isinstance(value, list):
        return [meaning(item, descriptions=descriptions) for item in value]
    if not isinstance(value, dict):
        return value
    made = {
        key: meaning(item, descriptions=descriptions, named=key in _NAMED and not named)
        for key, item in value.items()
        if named or descriptions or key != "description"
    }
    cases = made.get("anyOf")
    if not named and isinstance(cases, list) and len(cases) == 2 and _NULL in cases:
        (other,) = [case for case in cases if case != _NULL]
        if not other or "null" in other.get("type", ()):
            return other | {key: item for key, item in made.items() if key != "anyOf"}
    return made


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """A line for each place where the documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key, _ABSENT), after.get(key, _ABSENT), f"{at}/{key}")
        return
    if isinstance(before, list) and isinstance(after, list):
        if at.rsplit("/", 1)[-1] in _SETS:
            before, after = (sorted(values, key=json.dumps) for values in (before, after))
        if len(before) == len(after):
            for number, (old, new) in enumerate(zip(before, after, strict=True)):
                yield from differences(old, new, f"{at}/{number}")
            return
    if before != after:
        yield f"{at}: {json.dumps(before)[:200]} -> {json.dumps(after)[:200]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--types", action="store_true", help="leave descriptions out")
    args = parser.parse_args()
    documents = [
        meaning(document_of(checkout), descriptions=not args.types)
        for checkout in (args.checkout, Path())
    ]
    found = list(differences(*documents))
    print("\n".join(found) or "the same")
    sys.exit(1 if found else 0)
