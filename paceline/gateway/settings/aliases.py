"""Model names with a ``*``: one entry of the configuration serves all names that match it.

::

    name "gpt-*"    requested: gpt-4o-mini    "*" stands for 4o-mini
    target "a:small"      the model small     "a:cloud-*"    the model cloud-4o-mini
    target "a"            gpt-4o-mini, or engine a's only model
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["Aliases", "fill", "is_alias", "stem_of"]

# text that a caller may put in place of ``*``: it ends up in upstream bodies, paths and headers, so
# no path segment may be empty or lead upwards
_STEM: Final = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,199}")


def is_alias(name: str) -> bool:
    return "*" in name


def stem_of(alias: str, name: str) -> str | None:
    """Return the text that ``*`` of ``alias`` stands for in ``name``; None if it does not match."""
    before, _, after = alias.partition("*")
    stem = name[len(before) : len(name) - len(after)]
    same = name == f"{before}{stem}{after}"
    return stem if same and _STEM.fullmatch(stem) else None


def fill(text: str, stem: str) -> str:
    """Replace ``*`` in ``text`` by ``stem``."""
    return text.replace("*", stem)


class Aliases:
    """Aliases of a configuration; if several match a name, the longest one wins."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(filter(is_alias, names), key=len, reverse=True)

    def find(self, name: str) -> tuple[str, str] | None:
        """Return the alias that matches ``name`` and what its ``*`` stands for, or None."""
        for alias in self.names:
            stem = stem_of(alias, name)
            if stem is not None:
                return alias, stem
        return None
