"""One request's guesses, and how often those like them were right lately.

A guess is judged whether it was verified or not: once the tokens are known, those that were guessed
for their places are compared with them. So a request whose guesses are not worth verifying is found
out when they become so, without a step being spent on it.

Guesses are alike that follow as long a match, and those behind a right one are counted apart: they
are right far more often than the first.

This module does not know steps, prices, or where guesses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.speculation.ngram import NO_GUESS, Drafter

__all__ = ["Acceptance", "Guesser"]

# a guess is taken to be right so often, as if that had been seen so many times
_PRIOR: Final = 0.6
_PRIOR_TRIES: Final = 4.0
# counts of one request, and of all, are halved beyond so many tries
_MOST_TRIES: Final = 32.0
_MOST_TRIES_OF_ALL: Final = 256.0
# matches are told apart up to this length
_MOST_MATCH: Final = 8
# weight of the newest token in the share that was guessed
_NEWEST: Final = 1 / 16
# a request's text is taken to be guessed so often until it is known
_FIRST_SHARE: Final = 0.5


class Acceptance:
    """How often guesses were right, all before them being right; counts fade.

    Args:
        others: of all requests, for what is known before this one has seen much; None: this is it.
    """

    __slots__ = ("_counts", "_most_tries", "_others")

    def __init__(self, others: Acceptance | None = None) -> None:
        self._most_tries = _MOST_TRIES_OF_ALL if others is None else _MOST_TRIES
        self._others = others
        # hits and tries by match length, of first guesses and of later ones
        self._counts: dict[tuple[int, bool], tuple[float, float]] = {}

    def rate(self, match: int, first: bool) -> float:
        """Above 0 and below 1."""
        prior = _PRIOR if self._others is None else self._others.rate(match, first)
        hits, tries = self._counts.get((min(match, _MOST_MATCH), first), (0.0, 0.0))
        return (hits + prior * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)

    def note(self, match: int, first: bool, right: bool) -> None:
        kind = min(match, _MOST_MATCH), first
        hits, tries = self._counts.get(kind, (0.0, 0.0))
        fade = 0.5 if tries >= self._most_tries else 1.0
        self._counts[kind] = (hits + right) * fade, (tries + 1.0) * fade
        if self._others is not None:
            self._others.note(match, first, right)


class Guesser:
    """Made when a request might first be given guesses.

    Args:
        others: of all requests.
    """

    __slots__ = ("_acceptance", "_drafter", "_expected", "_from", "_tokens", "share")

    def __init__(self, drafter: Drafter, prompt: Sequence[int], others: Acceptance) -> None:
        self._drafter = drafter
        self._tokens = list(prompt)
        # what was guessed last, and for which position on
        self._expected = NO_GUESS
        self._from = 0
        self._acceptance = Acceptance(others)
        # of late, this share of the places guessed for had a first guess that was right
        self.share = _FIRST_SHARE

    def guess(self, num_prompt: int, output: Sequence[int], count: int) -> Sequence[int]:
        """Learn from what has become known, and guess up to ``count`` tokens that follow it.

        Args:
            num_prompt: tokens before the first of ``output``.
        """
        tokens = self._tokens
        new = output[len(tokens) - num_prompt :]
        tokens += new
        if new:
            self._judge()
        elif self._expected.token_ids:
            return self._expected.token_ids[:count]
        self._expected = self._drafter.propose(tokens, count)
        self._from = len(tokens)
        return self._expected.token_ids[:count]

    def survivals(self, count: int) -> list[float]:
        """How likely each of the last guesses is to be right, those before it too."""
        match = self._expected.match
        first, later = (self._acceptance.rate(match, first) for first in (True, False))
        return [first * later**place for place in range(count)]

    def _judge(self) -> None:
        token_ids, match = self._expected
        hit = False
        known = self._tokens[self._from :]
        for place, (guess, token) in enumerate(zip(token_ids, known, strict=False)):
            right = guess == token
            self._acceptance.note(match, not place, right)
            hit = hit or right
            if not right:
                break
        self.share += (hit - self.share) * _NEWEST
