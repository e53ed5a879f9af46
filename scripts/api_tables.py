"""Writes the tables of fields in docs/use/api.md, from the bodies that the server reads.

    python scripts/api_tables.py [--write]

Without ``--write`` it says whether the page is as it would be written. The sections of ``SECTIONS``
have the tables of bodies, "Other servers' names" the names that chat and completions translate.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from paceline.server.apis.ollama.protocol import OllamaOptions
from paceline.server.batches.routes import BatchBody
from paceline.server.openapi.document import BODIES
from paceline.server.protocol.body import (
    IGNORED,
    REFUSED,
    SERVED,
    Body,
    Field,
    fields_of,
    other_names_of,
)
from paceline.server.protocol.generation import ChatBody, CompletionBody

PAGE: Final = Path(__file__).parents[1] / "docs" / "use" / "api.md"
# whose sections have tables
PATHS: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/inference/v1/generate", "/api/chat", "/api/generate", "/completion", "/v1/batches",
    "/tokenize", "/detokenize", "/v1/embeddings", "/rerank", "/score", "/classify", "/pooling",
    "/api/embed", "/api/embeddings",
)  # fmt: skip
# by title; several bodies are alternatives
SECTIONS: Final[dict[str, tuple[type[Body], ...]]] = {
    **{f"`{path}`": (BODIES | {"/v1/batches": (BatchBody,)})[path] for path in PATHS},
    "Ollama's options": (OllamaOptions,),
}
_OTHER_NAMES: Final = "Other servers' names"
_TABLE: Final = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def fields_in(title: str) -> Mapping[str, Field[Any]]:
    """What may be in the body of a section, served where any of the alternatives serves it."""
    found: dict[str, Field[Any]] = {}
    for body in SECTIONS[title]:
        for name, field in fields_of(body).items():
            if name not in found or found[name].status == REFUSED:
                found[name] = field
    return found


def table_of(fields: Mapping[str, Field[Any]], *, of_chat: bool = False) -> str:
    """The fields of a body, those with the same to be said of them in one line.

    Args:
        of_chat: it is chat's own, to which the others refer.
    """
    chat = {} if of_chat else fields_of(ChatBody)

    def note(name: str) -> str:
        # the schema is chat's also where a field is passed on unread
        same = name in chat and chat[name].schema is fields[name].schema
        return "as in chat" if same and fields[name].status != IGNORED else fields[name].note

    lines: list[tuple[str, ...]] = []
    for status in (SERVED, IGNORED, REFUSED):
        names = [name for name, field in fields.items() if field.status == status]
        lines += [(_quoted(group), status, said) for said, group in groupby(names, key=note)]
    return _drawn(("field", "status", "note"), lines)


def other_names() -> str:
    """Names of other servers for fields of chat and completions."""
    names = other_names_of(CompletionBody)
    assert names == other_names_of(ChatBody)
    ours: dict[str, list[str]] = {}
    for name, other in names.items():
        target = other.ours if other.key is None else f"{other.ours}.{other.key}"
        ours.setdefault(target, []).append(name)
    lines = []
    for target, group in ours.items():
        notes = [f"{name} {names[name].note}" for name in group if names[name].note]
        lines.append((_quoted(group), "; ".join([f"`{target}`", *notes])))
    return _drawn(("field", "stands for"), lines)


def page_of(text: str) -> str:
    """The page with its tables made anew."""
    tables = {
        title: table_of(fields_in(title), of_chat=ChatBody in bodies)
        for title, bodies in SECTIONS.items()
    }
    for title, table in {**tables, _OTHER_NAMES: other_names()}.items():
        before, heading, rest = text.partition(f"\n## {title}\n")
        section, next_heading, after = rest.partition("\n## ")
        old = _TABLE.search(section)
        assert old is not None, f"{PAGE} has no section {title} with a table"
        section = section[: old.start()] + table + section[old.end() :]
        text = before + heading + section + next_heading + after
    return text


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _drawn(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    drawn = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cells in lines:
        told = (cell.replace("|", "\\|") for cell in cells)
        drawn.append("|" + "|".join(f" {cell} " if cell else " " for cell in told) + "|")
    return "\n".join(drawn) + "\n"


def main() -> int:
    text = PAGE.read_text()
    made = page_of(text)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
        return 0
    if made != text:
        print("docs/use/api.md is not what `make api-tables` would write")
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main())
