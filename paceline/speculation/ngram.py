"""Drafts from a request's own text: the tokens after the last occurrence of its latest tokens.

This module does not know requests, steps or how many draft tokens are worth their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.drafter import NO_DRAFT, DraftTokens
from paceline.speculation.draft_tokens import NGRAM

__all__ = ["NgramDrafter"]

# most tokens that one call indexes, as a step waits for it
_INDEXED: Final = 1024
# most positions of the last two tokens to look at, the latest first
_LOOKED: Final = 64


class NgramDrafter:
    """Prompt lookup: finds the longest earlier occurrence of the last ``least`` to ``most`` tokens,
    and drafts what followed the latest such. A token is indexed once, from the first on and a
    bounded number per call, so the end of a long prompt is found some calls later."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        # last position where a token ends, and where a pair does; the first pair begins with -1
        self._latest: dict[int | tuple[int, int], int] = {}
        # by position, the previous position where the same pair ends; 0: none
        self._earlier = [0]

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        total, latest, earlier = len(tokens), self._latest, self._earlier
        for end in range(len(earlier), min(total, len(earlier) + _INDEXED)):
            pair = tokens[end - 2] if end > 1 else -1, tokens[end - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = latest[pair[1]] = end
        match = found = 0
        place = latest.get((tokens[-2], tokens[-1]), 0) if min(self._most, total) > 1 else 0
        for _ in range(_LOOKED):
            if not place or match == self._most:
                break
            most, length = min(self._most, place), 2
            while length < most and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > match:
                match, found = length, place
            place = earlier[place]
        if not found and total:
            match, found = 1, latest.get(tokens[-1], 0)
        if not found or match < self._least:
            return NO_DRAFT
        drafts = list(tokens[found : found + count])
        # a text that repeats itself is assumed to go on doing so
        while len(drafts) < count:
            drafts += drafts[: count - len(drafts)]
        return DraftTokens(drafts, match, NGRAM)
