"""Guesses from a request's own text: what followed the last time its latest tokens occurred.

This module does not know requests, steps or how many guesses are worth their time.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.speculation.guess import NO_GUESS, Guess

__all__ = ["NgramDrafter"]


class NgramDrafter:
    """Prompt lookup: the longest of the last ``most`` to ``least`` tokens that occurred before,
    and what followed the latest occurrence. A token is indexed once, so a call takes time in
    proportion to the tokens that are new."""

    def __init__(self, least: int, most: int) -> None:
        self._lengths = range(most, least - 1, -1)
        # where the latest occurrence of these tokens ends, those that end the sequence left out
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        total, ends = len(tokens), self._ends
        for end in range(self._num_indexed, total):
            for length in self._lengths:
                if length <= end:
                    ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = total
        for length in self._lengths:
            if length > total:
                continue
            found = ends.get(tuple(tokens[total - length :]))
            if found is not None:
                # a text that repeats itself is taken to go on doing so
                return Guess([tokens[found + i % (total - found)] for i in range(count)], length)
        return NO_GUESS
