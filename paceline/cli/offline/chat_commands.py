"""Commands of ``paceline chat``: lines that begin with a slash."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["HELP", "HINT", "Command", "parse"]

HINT: Final = "Type a message; /help lists the commands, /exit or Ctrl-D leaves."
HELP: Final = """\
/help               this list
/reset              forget what was said
/retry              answer the last message once more
/system TEXT        tell the model TEXT first, from the next answer on; without TEXT: nothing
/temperature T      0 always takes the likeliest token
/exit, /bye         leave (Ctrl-D too); Ctrl-C stops an answer
//...               a message that begins with a slash"""

Name = Literal["help", "reset", "retry", "system", "temperature", "exit"]
_NAMES: Final[dict[str, Name]] = {
    "/help": "help", "/?": "help", "/reset": "reset", "/clear": "reset", "/retry": "retry",
    "/system": "system", "/temperature": "temperature", "/exit": "exit", "/bye": "exit",
    "/quit": "exit",
}  # fmt: skip
# a path is not a command: it has another slash
_LOOKS_LIKE_ONE: Final = re.compile(r"/[A-Za-z?-]+")


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its argument."""

    # None: an unknown command
    name: Name | None
    # first word of the line, as typed
    word: str
    rest: str


def parse(line: str) -> Command | str:
    """Parse a line into a command; return it unchanged if it is a message."""
    if line.startswith("//"):
        return line[1:]
    word, _, rest = line.partition(" ")
    if word in _NAMES:
        return Command(_NAMES[word], word, rest.strip())
    return Command(None, word, rest.strip()) if _LOOKS_LIKE_ONE.fullmatch(word) else line
