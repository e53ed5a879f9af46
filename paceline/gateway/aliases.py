"""Models whose name has a ``*``: one entry of the configuration for all names that look alike.

::

    name "gpt-*"    asked for gpt-4o-mini     "*" stands for 4o-mini
    target "a:small"      the model small     "a:cloud-*"    the model cloud-4o-mini
    target "a"            gpt-4o-mini, or the only model that a has
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["Aliases", "fill", "is_alias", "stem_of"]

# what a caller may have written there: it becomes a part of what engines are sent, of paths and
# headers too, so no step of a path may be empty or lead upwards
_STEM: Final = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,199}")


def is_alias(name: str) -> bool:
    return "*" in name


def stem_of(alias: str, name: str) -> str | None:
    """What the ``*`` of ``alias`` stands for in ``name``; None: it is no such name."""
    before, _, after = alias.partition("*")
    stem = name[len(before) : len(name) - len(after)]
    same = name == f"{before}{stem}{after}"
    return stem if same and _STEM.fullmatch(stem) else None


def fill(text: str, stem: str) -> str:
    """``text`` with what ``*`` stands for."""
    return text.replace("*", stem)


class Aliases:
    """Of a configuration; of several that match, the one that says most counts."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(filter(is_alias, names), key=len, reverse=True)

    def find(self, name: str) -> tuple[str, str] | None:
        """The one for ``name``, and what its ``*`` stands for there; None: there is none."""
        for alias in self.names:
            stem = stem_of(alias, name)
            if stem is not None:
                return alias, stem
        return None
