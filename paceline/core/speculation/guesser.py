"""One request's guesses, and how often they were right lately.

A guess is judged whether it was verified or not: once the tokens are known, those that were guessed
for their places are compared with them. So a request whose guesses are not worth verifying is found
out when they become so, without a step being spent on it.

This module does not know steps, prices, or where guesses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.speculation.ngram import Drafter

__all__ = ["Guesser"]

# a guess is taken to be right so often, as if that had been seen so many times
_PRIOR: Final = 0.6
_PRIOR_TRIES: Final = 4.0
# counts are halved beyond so many tries
_MOST_TRIES: Final = 32.0


class Guesser:
    """Made when a request might first be given guesses."""

    __slots__ = ("_drafter", "_expected", "_from", "_hits", "_tokens", "_tries")

    def __init__(self, drafter: Drafter, prompt: Sequence[int]) -> None:
        self._drafter = drafter
        self._tokens = list(prompt)
        # what was guessed last, and for which position on
        self._expected: Sequence[int] = ()
        self._from = 0
        self._hits = self._tries = 0.0

    @property
    def acceptance(self) -> float:
        """How often a guess was right of late, all guesses before it being right; below 1."""
        return (self._hits + _PRIOR * _PRIOR_TRIES) / (self._tries + _PRIOR_TRIES)

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
        elif self._expected:
            return self._expected[:count]
        self._expected = self._drafter.propose(tokens, count)[:count]
        self._from = len(tokens)
        return self._expected

    def _judge(self) -> None:
        for guess, token in zip(self._expected, self._tokens[self._from :], strict=False):
            self._tries += 1.0
            if guess != token:
                break
            self._hits += 1.0
        if self._tries > _MOST_TRIES:
            self._tries *= 0.5
            self._hits *= 0.5
