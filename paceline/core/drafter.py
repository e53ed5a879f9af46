"""The interface of a source of draft tokens, one for each sequence.

This module does not know sources, or which drafts are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

__all__ = ["NO_DRAFT", "DraftTokens", "Drafter"]


class DraftTokens(NamedTuple):
    """Draft tokens that may come next."""

    token_ids: Sequence[int]
    # number of latest tokens that matched
    match: int
    # name of the source in statistics
    source: str


NO_DRAFT: Final = DraftTokens((), 0, "")


class Drafter(Protocol):
    """A source of draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        """Return up to ``count`` draft tokens, most often fewer or none.

        Args:
            tokens: all known tokens, prompt and output; each call's begin with the last call's.
        """
