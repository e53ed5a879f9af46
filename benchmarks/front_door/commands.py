"""The 60 command lines of commands.txt, as values.

This module does not know what any of their flags means.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MODEL", "TEMPLATE", "Command", "commands"]

# words that stand for a model, and for a file with a chat template
MODEL: Final = "MODEL"
TEMPLATE: Final = "TEMPLATE"
_LIST: Final = Path(__file__).with_name("commands.txt")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line and where it was found."""

    # heading of the list: vllm, llama.cpp or ollama
    server: str
    # address of the page
    source: str
    # variables set before the command
    environment: dict[str, str]
    # program and arguments
    words: tuple[str, ...]

    @property
    def num_flags(self) -> int:
        """Return how many flags and variables it sets."""
        return len(self.environment) + sum(word.startswith("-") for word in self._arguments)

    @property
    def _arguments(self) -> tuple[str, ...]:
        start = 3 if self.words[0].startswith("python") else 1
        return self.words[start:]

    def arguments(self, model: str, template: str) -> tuple[str, ...]:
        """Return the arguments of ``paceline`` for it: its first word is ``serve`` or ``run``."""
        known = {MODEL: model, TEMPLATE: template, f"--model={MODEL}": f"--model={model}"}
        words = tuple(known.get(word, word) for word in self._arguments)
        if words == ("serve",):
            # Ollama's server is asked for a model later
            return ("serve", model)
        return words if words[:1] in (("serve",), ("run",)) else ("serve", *words)


def commands(path: Path = _LIST) -> tuple[Command, ...]:
    """Return the list in the file's order. Raises ValueError for a command without a source."""
    found: list[Command] = []
    server = source = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\[(.+)\]", line):
            server = heading[1]
        elif address := re.fullmatch(r"# (https://\S+)", line):
            source = address[1]
        elif line and not line.startswith("#"):
            if not (server and source):
                raise ValueError(f"{path.name}: no source stands before {line!r}")
            words = shlex.split(line)
            count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
            pairs = dict(word.split("=", 1) for word in words[:count])
            found.append(Command(server, source, pairs, tuple(words[count:])))
            source = ""
    return tuple(found)
