"""Draft tokens of one sequence, and the interface of their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from paceline.core.outputs import DRAFT_MODEL

__all__ = [
    "GRAMMAR", "NGRAM", "NO_DRAFT", "PREDICTION", "UNMADE", "DraftTokens", "Drafter",
    "ModelDrafter",
]  # fmt: skip

# sources, as statistics name them
NGRAM: Final = "ngram"
PREDICTION: Final = "prediction"
GRAMMAR: Final = "grammar"
# placeholder for each token that the backend's draft model makes in the step that verifies it
UNMADE: Final = -1


class DraftTokens(NamedTuple):
    """Draft tokens that may come next."""

    token_ids: Sequence[int]
    # number of latest tokens that matched
    match: int
    source: str = NGRAM


NO_DRAFT: Final = DraftTokens((), 0)


class Drafter(Protocol):
    """A source of draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        """Return up to ``count`` draft tokens, most often fewer or none.

        Args:
            tokens: all known tokens, prompt and output; each call's begin with the last call's.
        """
        ...


class ModelDrafter:
    """Leaves drafting to the backend's draft model."""

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        return DraftTokens([UNMADE] * count, 0, DRAFT_MODEL)
