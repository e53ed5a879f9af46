"""Whether an answer repeats itself: small models fall into loops that only a length limit ends.

The page has the same rule, in ``paceline/web/static/lib/repeats.js``; ``tests/ui/vectors`` holds
both to it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

__all__ = ["Repetition"]

# so many words in a row, so often, make a loop: eight times four words are a sixth of 200 tokens
_WORDS: Final = 4
_TIMES: Final = 8
# characters at the end that are one unit over and over, and how often at least
_TAIL: Final = 160
_UNITS: Final = 8


class Repetition:
    """Watches one answer. ``add`` is called with each piece of it, in order."""

    def __init__(self) -> None:
        self._tail = ""
        # the word that has not ended yet
        self._open = ""
        self._last: tuple[str, ...] = ()
        self._runs: Counter[tuple[str, ...]] = Counter()

    def add(self, text: str) -> bool:
        """Return whether the answer repeats itself, ``text`` included: the same four words in a row
        stand in it for the eighth time, or its last 160 characters are one unit."""
        self._tail = (self._tail + text)[-_TAIL:]
        *ended, self._open = re.split(r"\s+", self._open + text)
        found = False
        for word in filter(None, ended):
            self._last = (*self._last, word)[-_WORDS:]
            if len(self._last) == _WORDS:
                self._runs[self._last] += 1
                found |= self._runs[self._last] >= _TIMES
        return found or (len(self._tail) == _TAIL and self._is_one_unit())

    def _is_one_unit(self) -> bool:
        # a unit may begin anywhere: the tail of one that is cut is one of another
        longest = _TAIL // _UNITS
        return any(
            self._tail[size:] == self._tail[:-size] and not self._tail[-size:].isspace()
            for size in range(1, longest + 1)
        )
