"""What a guess is, and the seam to whatever makes some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from paceline.core.outputs import DRAFT_MODEL

__all__ = [
    "GRAMMAR", "NGRAM", "NO_GUESS", "PREDICTION", "UNMADE", "Drafter", "Guess",
    "ModelDrafter",
]  # fmt: skip

# sources, as they are called in accounts
NGRAM: Final = "ngram"
PREDICTION: Final = "prediction"
GRAMMAR: Final = "grammar"
# in the place of each guess that the backend's draft model makes when it is verified
UNMADE: Final = -1


class Guess(NamedTuple):
    """What may come next."""

    token_ids: Sequence[int]
    # so many of the latest tokens speak for it
    match: int
    source: str = NGRAM


NO_GUESS: Final = Guess((), 0)


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        """Up to ``count`` guesses, most often fewer or none.

        Args:
            tokens: all that is known, prompt and output; each call's begin with the last call's.
        """
        ...


class ModelDrafter:
    """Leaves it to the backend's draft model."""

    def propose(self, tokens: Sequence[int], count: int) -> Guess:
        return Guess([UNMADE] * count, 0, DRAFT_MODEL)
