"""Drafts in a simulation: the share that is right is an input, not a result.

A simulated text has no words to draft from. So a drafter that knows the coming tokens spoils some
drafts: the draft at index ``i`` is right with the ``i``-th of the given probabilities, if those
before it are right. Which are spoilt follows from the request, its length and the index alone, so a
live engine over the null backend with the same drafter decides alike.

This module does not know schedules, or how tokens are verified.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.drafter import DraftTokens
from paceline.core.request import MOST_DRAFT_TOKENS, Request
from paceline.errors import ConfigError
from paceline.speculation.draft_tokens import NGRAM
from paceline.speculation.drafts import DrafterMaker

__all__ = ["Truth", "check_acceptance", "drafter_maker"]

# (request, known tokens, count) -> the next ``count`` tokens, or fewer
Truth = Callable[[Request, int, int], Sequence[int]]

_CHANCES: Final = 2**32


class _Drafter:
    def __init__(self, acceptance: Sequence[float], request: Request, truth: Truth) -> None:
        self._acceptance = acceptance
        self._request = request
        self._truth = truth

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        known = len(tokens)
        drafts = list(self._truth(self._request, known, min(count, len(self._acceptance))))
        for place in range(len(drafts)):
            name = f"{self._request.request_id} {known} {place}"
            if zlib.crc32(name.encode()) >= self._acceptance[place] * _CHANCES:
                # a wrong draft; tokens after it do not matter
                drafts[place] += 2
                break
        return DraftTokens(drafts, 1, NGRAM)


def drafter_maker(acceptance: Sequence[float], truth: Truth) -> DrafterMaker:
    """Return a maker of drafters for ``Drafts``."""
    return lambda request: _Drafter(acceptance, request, truth)


def check_acceptance(acceptance: Sequence[float]) -> None:
    """Raise ConfigError unless these are probabilities, of no more drafts than are allowed."""
    most = MOST_DRAFT_TOKENS
    if len(acceptance) > most or not all(0.0 <= chance <= 1.0 for chance in acceptance):
        raise ConfigError(
            f"acceptance must be up to {most} chances from 0 to 1, one for each draft of a "
            f"row, got {', '.join(f'{chance:g}' for chance in acceptance[:40])}"
        )
