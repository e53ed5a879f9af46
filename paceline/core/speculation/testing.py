"""Drafters that do what a test wants: always right, always wrong, or nothing that makes sense.

Whatever a drafter says, an answer must be what it would be without. With the null backend, whose
answer after ``prompt`` is known::

    ScriptedDrafter([*prompt, *expected_tokens(prompt, 200, vocab)], vocab)            always right
    ScriptedDrafter(..., wrong=(0,))                                                   always wrong
    ScriptedDrafter(..., wrong=(2,), extra=9)         right twice, then wrong; more than it may say
    ForeignDrafter()                                                         ids that are no tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.speculation.guess import Guess

__all__ = ["ForeignDrafter", "ScriptedDrafter"]

# above every vocabulary, and below what an id may be
_NO_TOKEN: Final = 1_000_000_000


class ScriptedDrafter:
    """Knows what will come, and spoils some of it.

    Args:
        text: prompt and output.
        wrong: places of a guess that are spoilt.
        extra: so many more tokens than it was asked for.
    """

    def __init__(
        self, text: Sequence[int], vocab_size: int, wrong: Sequence[int] = (), extra: int = 0
    ) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self.wrong = wrong
        self._extra = extra

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        guesses = list(self._text[len(tokens) : len(tokens) + count + self._extra])
        for place in self.wrong:
            if place < len(guesses):
                guesses[place] = (guesses[place] + 1) % self._vocab_size
        return Guess(guesses, 1)


class ForeignDrafter:
    """Guesses that are no tokens."""

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        return Guess([_NO_TOKEN] * count, 1)
