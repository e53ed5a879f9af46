"""Guesses from what the caller expects: OpenAI's ``prediction``.

The output is followed through the prediction with a finger::

    prediction   def area ( w , h ) : result = w * h
    output       def area ( w , h ) : total  ?
                                      |      ^ guessed: = w * h
                                      a token took the place of another

A token that is not the one under the finger may have taken its place, so the guess goes on behind
it; if it is found elsewhere, the finger goes there, to the place where most tokens before it are
those of the output too.

This module does not know requests, steps or how many guesses are worth their time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from paceline.speculation.guess import NO_GUESS, PREDICTION, Guess

__all__ = ["PredictionDrafter"]

# places of a token that are looked at, behind the finger and before it
_AHEAD: Final = 12
_BACK: Final = 4
# tokens that speak for a place are counted up to this number
_MOST_MATCH: Final = 8
# tokens of the prediction indexed, and of the output read, in one call at most: a step waits
_INDEXED: Final = 512
_READ: Final = 128


class PredictionDrafter:
    """Never looks outside the prediction.

    Args:
        num_prompt: tokens before the output.
    """

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        self._prediction = prediction
        self._num_prompt = num_prompt
        # where each token ends, in order, of so many
        self._ends: dict[int, list[int]] = {}
        self._num_indexed = 0
        # the finger, and so many tokens before it that were those of the output
        self._at = 0
        self._match = 0
        self._num_read = num_prompt

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        first, self._num_indexed = self._num_indexed, self._num_indexed + _INDEXED
        for end, token in enumerate(self._prediction[first : self._num_indexed], first + 1):
            self._ends.setdefault(token, []).append(end)
        first, self._num_read = self._num_read, min(len(tokens), self._num_read + _READ)
        for end in range(first + 1, self._num_read + 1):
            self._read(tokens, end)
        if self._num_read < len(tokens):
            return NO_GUESS
        return Guess(self._prediction[self._at : self._at + count], self._match, PREDICTION)

    def _read(self, tokens: Sequence[int], end: int) -> None:
        """Move the finger over the token before ``end``."""
        prediction, token, at = self._prediction, tokens[end - 1], self._at
        if at < len(prediction) and prediction[at] == token:
            self._at += 1
            self._match += 1
            return
        ends = self._ends.get(token)
        if ends is None:
            self._at = min(at + 1, len(prediction))
            self._match = 0
            return
        first = bisect_left(ends, at)
        near = ends[max(0, first - _BACK) : first + _AHEAD]
        # of equals the nearest that is still to come, as what follows is likelier than what is gone
        self._match, _, _, self._at = max(
            (self._matching(tokens, end, place), place >= at, -abs(place - at), place)
            for place in near
        )

    def _matching(self, tokens: Sequence[int], end: int, place: int) -> int:
        """So many tokens before a place of the prediction are those at the end of the output."""
        most = min(_MOST_MATCH, place, end - self._num_prompt)
        for length in range(1, most):
            if self._prediction[place - length - 1] != tokens[end - length - 1]:
                return length
        return most
