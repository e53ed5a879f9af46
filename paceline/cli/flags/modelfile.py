"""Ollama's Modelfiles, as far as they name an adapter.

::

    FROM smollm2-135m            the model that is served
    ADAPTER ./sql                a folder of peft or a GGUF file

Other instructions would change answers, and are refused by name. This module does not know what is
served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from paceline.errors import ConfigError

__all__ = ["Modelfile", "is_modelfile", "read_modelfile"]

_READ: Final = ("FROM", "ADAPTER")
# text for people
_IGNORED: Final = ("LICENSE", "REQUIRES")
_QUOTES: Final = '"""'
_MOST_BYTES: Final = 1 << 20


class Modelfile(NamedTuple):
    """A model and the adapter on it."""

    base: str
    adapter: Path


def is_modelfile(path: Path) -> bool:
    """Return whether a file's name says that it is a Modelfile."""
    name = path.name.lower()
    return (name.startswith("modelfile") or name.endswith(".modelfile")) and path.is_file()


def read_modelfile(path: Path) -> Modelfile:
    """Read a Modelfile; paths in it are relative to its folder. Raises ConfigError for one that
    does not name a model and an adapter that is there, or says more."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a Modelfile: {error}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES} bytes: it is no Modelfile")
    found: dict[str, str] = {}
    for number, instruction, value in _instructions(text):
        if instruction in _IGNORED:
            continue
        if instruction not in _READ:
            raise ConfigError(
                f"{path}, line {number}: {instruction:.40} is not served, only FROM and ADAPTER: "
                "take it out, and send what it says with requests"
            )
        if instruction in found:
            raise ConfigError(f"{path}, line {number}: a second {instruction} is not served")
        found[instruction] = value.strip().strip('"')
    for instruction in _READ:
        if not found.get(instruction):
            raise ConfigError(f"{path} has no {instruction}")
    adapter = path.parent / Path(found["ADAPTER"]).expanduser()
    if not adapter.exists():
        raise ConfigError(f"{path}: ADAPTER {adapter}: no such file or folder")
    return Modelfile(found["FROM"], adapter)


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Return line, instruction and value of each; values in three quotes have several lines."""
    found: list[tuple[int, str, str]] = []
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        instruction, _, value = line.strip().partition(" ")
        if value.count(_QUOTES) == 1:
            for _, more in lines:
                value += "\n" + more
                if _QUOTES in more:
                    break
        found.append((number, instruction.upper(), value))
    return found
