"""Whether an answer repeats itself: small models fall into loops that only a length limit ends.

The page has the same rule, in ``paceline/web/static/lib/repeats.js``; ``tests/ui/vectors`` holds
both to it.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Repetition"]

# a loop is one stretch of words over and over, at least four words long, eight times in a row; a
# longer stretch needs fewer times, once so many words stand where they stood before
_WORDS: Final = 4
_TIMES: Final = 8
_MANY: Final = 100
_LEAST: Final = 4
# characters at the end that are one unit over and over, and how often at least
_TAIL: Final = 160
_UNITS: Final = 8


class Repetition:
    """Watches one answer. ``add`` is called with each piece of it, in order.

    Words without a letter do not count: a list has its numbers, a table its bars and dashes. Rows
    and lines that begin alike but go on differently are no loop.
    """

    def __init__(self) -> None:
        self._tail = ""
        # the word that has not ended yet
        self._open = ""
        self._words: list[str] = []
        # where each run of four words stood last
        self._at: dict[tuple[str, ...], int] = {}
        # the words since the last ``_same`` are those that stand ``_distance`` words before
        self._distance = self._same = 0

    def add(self, text: str) -> bool:
        """Return whether the answer repeats itself, ``text`` included."""
        self._tail = (self._tail + text)[-_TAIL:]
        *ended, self._open = re.split(r"\s+", self._open + text)
        found = False
        for word in ended:
            if any(map(str.isalpha, word)):
                found |= self._is_loop(word)
        return found or (len(self._tail) == _TAIL and self._is_one_unit())

    def _is_loop(self, word: str) -> bool:
        words = self._words
        words.append(word)
        here = len(words) - 1
        run = tuple(words[-_WORDS:])
        if self._distance and words[here - self._distance] == word:
            self._same += 1
        else:
            before = self._at.get(run)
            self._distance = 0 if before is None else here - before
            self._same = _WORDS if self._distance else 0
        self._at[run] = here
        again = min((_TIMES - 1) * self._distance, max(_MANY, (_LEAST - 1) * self._distance))
        return bool(self._distance) and self._same >= max((_TIMES - 1) * _WORDS, again)

    def _is_one_unit(self) -> bool:
        # a unit may begin anywhere: the tail of one that is cut is one of another
        longest = _TAIL // _UNITS
        return any(
            self._tail[size:] == self._tail[:-size] and not self._tail[-size:].isspace()
            for size in range(1, longest + 1)
        )
