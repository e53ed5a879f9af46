"""Names of the sources of draft tokens, and the one that leaves them to the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.drafter import DraftTokens
from paceline.core.outputs import DRAFT_MODEL

__all__ = ["GRAMMAR", "NGRAM", "PREDICTION", "UNMADE", "ModelDrafter"]

# sources, as statistics name them
NGRAM: Final = "ngram"
PREDICTION: Final = "prediction"
GRAMMAR: Final = "grammar"
# placeholder for each token that the backend's draft model makes in the step that verifies it
UNMADE: Final = -1


class ModelDrafter:
    """Leaves drafting to the backend's draft model."""

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        return DraftTokens([UNMADE] * count, 0, DRAFT_MODEL)
