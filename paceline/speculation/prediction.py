"""Drafts from the output that the caller expects: OpenAI's ``prediction``.

A finger follows the output through the prediction::

    prediction   def area ( w , h ) : result = w * h
    output       def area ( w , h ) : total  ?
                                      |      ^ drafted: = w * h
                                      one token was replaced by another

A token other than the one under the finger may have replaced it, so drafts go on after it; if the
token occurs nearby, the finger moves there, to the occurrence before which most tokens equal those
of the output.

This module does not know requests, steps or how many draft tokens are worth their time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from paceline.core.drafter import NO_DRAFT, DraftTokens
from paceline.speculation.draft_tokens import PREDICTION

__all__ = ["PredictionDrafter"]

# occurrences of a token to look at, after the finger and before it
_AHEAD: Final = 12
_BACK: Final = 4
# most tokens compared before an occurrence
_MOST_MATCH: Final = 8
# most tokens of the prediction indexed, and of the output read, per call, as a step waits
_INDEXED: Final = 512
_READ: Final = 128


class PredictionDrafter:
    """Drafts from the prediction; never looks outside it.

    Args:
        num_prompt: tokens before the output.
    """

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        self._prediction = prediction
        self._num_prompt = num_prompt
        # positions where each token ends, in order, and the number of tokens indexed
        self._ends: dict[int, list[int]] = {}
        self._num_indexed = 0
        # the finger, and the number of tokens before it that equal those of the output
        self._at = 0
        self._match = 0
        self._num_read = num_prompt

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        first, self._num_indexed = self._num_indexed, self._num_indexed + _INDEXED
        for end, token in enumerate(self._prediction[first : self._num_indexed], first + 1):
            self._ends.setdefault(token, []).append(end)
        first, self._num_read = self._num_read, min(len(tokens), self._num_read + _READ)
        for end in range(first + 1, self._num_read + 1):
            self._read(tokens, end)
        if self._num_read < len(tokens):
            return NO_DRAFT
        return DraftTokens(self._prediction[self._at : self._at + count], self._match, PREDICTION)

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
        # among equals the nearest one, rather ahead, as later text is likelier than past text
        self._match, _, _, self._at = max(
            (self._matching(tokens, end, place), place >= at, -abs(place - at), place)
            for place in near
        )

    def _matching(self, tokens: Sequence[int], end: int, place: int) -> int:
        """Count the tokens before ``place`` in the prediction that equal the end of the output."""
        most = min(_MOST_MATCH, place, end - self._num_prompt)
        for length in range(1, most):
            if self._prediction[place - length - 1] != tokens[end - length - 1]:
                return length
        return most
