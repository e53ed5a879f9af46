"""Rows to guess for, and what draws guesses that a model of integers makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from paceline.backends.runner.drafting import DraftRow
from paceline.backends.runner.sampling import PreparedSampling, SampleRow, Samples
from paceline.core.sampling_params import SamplingParams

__all__ = ["BLOCKS", "LONGEST", "SIZE", "VOCAB", "Likeliest", "draft_row", "drafts_of"]

VOCAB: Final = 97
# tokens a block, and blocks of the pool
SIZE: Final = 4
BLOCKS: Final = 64
# tokens of the longest request
LONGEST: Final = 600
_GREEDY: Final = PreparedSampling(SamplingParams(max_tokens=1, temperature=0.0), VOCAB)


class Likeliest:
    """A ``Sampler`` of tokens that are told as the likeliest ones, or else in the logits' place."""

    def sample(self, logits: Any, rows: Sequence[SampleRow], likeliest: Any = None) -> Samples:
        chosen = logits if likeliest is None else likeliest
        return Samples(chosen.tolist(), [True] * len(rows), [None] * len(rows))


def draft_row(tokens: Sequence[int], blocks: Sequence[int], count: int = 4) -> DraftRow:
    """A request of so many tokens in these blocks, for which ``count`` guesses are wanted."""
    array = np.zeros(LONGEST + 1, dtype=np.int32)
    array[: len(tokens)] = tokens
    table = np.zeros(LONGEST // SIZE + 1, dtype=np.int32)
    table[: len(blocks)] = blocks
    return DraftRow(array, table, len(tokens) - 1, count, _GREEDY, 1)


def drafts_of(row: DraftRow, count: int) -> list[int]:
    """The first ``count`` that were written."""
    return row.tokens[row.last + 1 : row.last + 1 + count].tolist()
