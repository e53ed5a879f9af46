"""Count docstrings and comments that are hard to read, and list them.

    python scripts/plain_words.py [--list] [--limit] [FOLDER ...]

A docstring begins with a verb phrase or a noun phrase that stands alone; a comment is a sentence
with a subject and a verb. A machine sees only some forms that are neither: a first word that hangs
on something outside the sentence ("Of those who wait.", "By place."), and words that hide who acts
("nobody", "whoever"). ``--limit`` fails where there are more than ``LIMITS`` allows.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

# a docstring that begins so says something of a thing that it does not name
HANGING: Final = frozenset(
    ("of", "by", "as", "at", "in", "on", "with", "without", "for", "from", "where", "when", "while",
     "until", "once", "beside", "besides", "after", "before", "that", "those", "these", "which",
     "who", "whom", "whose", "whoever", "nobody", "what", "whatever", "if", "so", "than", "into",
     "to", "also", "only", "not", "it", "they", "its", "their", "nothing", "none", "see")
)  # fmt: skip
# the same for the first line of a comment
LEADING: Final = frozenset(
    ("of", "what", "whatever", "who", "whom", "whose", "whoever", "that", "those", "which",
     "nobody")
)  # fmt: skip
HIDDEN: Final = re.compile(r"\b(nobody|whoever)\b", re.IGNORECASE)
# how many of each there may be below paceline/
LIMITS: Final = {"docstring": 10, "comment": 100, "hidden": 10}
_FIRST_WORD: Final = re.compile(r"[`*(\"']*([A-Za-z]+)")
# comments that are read by tools
_FOR_TOOLS: Final = ("noqa", "type:", "fmt:", "pragma", "!", "isort:", "mypy:", "SPDX")


class Place(NamedTuple):
    """A sentence of a form that is hard to read."""

    form: str
    path: Path
    line: int
    text: str


def places(path: Path) -> Iterator[Place]:
    """Yield every such sentence of a Python file, in no order."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and _first_word(text) in HANGING:
            line = node.body[0].lineno
            yield Place("docstring", path, line, text.splitlines()[0])
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            # a comment of several lines begins once
            begins = token.start[0] != before + 1
            before = token.start[0]
            if begins and not text.startswith(_FOR_TOOLS) and _first_word(text) in LEADING:
                yield Place("comment", path, token.start[0], text)
    for number, text in enumerate(source.splitlines(), 1):
        if HIDDEN.search(text):
            yield Place("hidden", path, number, text.strip())


def _first_word(text: str) -> str:
    found = _FIRST_WORD.match(text.strip())
    return found[1].lower() if found else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; return 1 where ``--limit`` is given and one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("paceline")])
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("--limit", action="store_true", help="fail above the limits of paceline/")
    options = parser.parse_args(arguments)
    files = (
        file
        for folder in options.folders
        for file in ([folder] if folder.is_file() else sorted(folder.rglob("*.py")))
    )
    found = [place for file in files for place in places(file)]
    if options.list:
        for place in found:
            print(f"{place.path}:{place.line}: {place.form}: {place.text}")
    counts = Counter(place.form for place in found)
    print(", ".join(f"{form} {counts[form]} (at most {most})" for form, most in LIMITS.items()))
    return int(options.limit and any(counts[form] > most for form, most in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
