"""The runner's interface to drafting inside a step: rows in, draft tokens written behind them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.backends.runner.interface import Sampler
from paceline.backends.runner.sampling import PreparedSampling
from paceline.core.sampling_params import SamplingParams

__all__ = ["DraftRow", "Drafting", "Made"]

_log = logging.getLogger(__name__)
# consecutive faults of single requests, without a draft between them, that turn the model off
_MOST_FAULTS: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class DraftRow:
    """A request to draft tokens for."""

    # [longest request]: known tokens, and slots behind them into which drafts are written
    tokens: NDArray[np.int32]
    # [longest request's blocks]: block ids by position // block_size, for all drafts but the last
    table: NDArray[np.int32]
    # position of the last known token, the only one that the served model has not computed
    last: int
    # drafts wanted, at least 1
    count: int
    # result of ``Drafting.prepare``
    sampling: PreparedSampling
    num_prompt_tokens: int
    # for the log
    request_id: str = ""


class Made(NamedTuple):
    """Result of drafting for one row."""

    # drafts written
    num_drafted: int = 0
    # known tokens that the model had lacked and has now computed
    caught_up: int = 0
    # known tokens that it must still compute before it drafts
    behind: int = 0
    # drafting failed, and would fail again
    failed: bool = False


class Drafting(ABC):
    """A source of drafts inside a step. Called from one thread, between steps of the served model.

    Args:
        sampler: draws its drafts.
        vocab_size: size of its own vocabulary.
        num_blocks: blocks of the served model's pool.
    """

    def __init__(
        self, sampler: Sampler, *, vocab_size: int, num_blocks: int, block_size: int
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._block_size = block_size
        # number of leading positions that each block holds, by block id
        self._held = np.zeros(num_blocks, dtype=np.int64)
        # known tokens computed in the last ``propose``, and still missing after it, by row
        self.caught_up: list[int] = []
        self.behind: list[int] = []
        # consecutive faults of single requests, and of several together
        self._num_faults = self._num_shared_faults = 0

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> list[int]:
        """Write up to ``count`` drafts behind the last known token of each row, and return how
        many. A row that lacks many known tokens gets none for now; see ``behind``."""

    @abstractmethod
    def forget(self, block_ids: Sequence[int], *, clear: bool = False) -> None:
        """Drop what these blocks hold: they are about to be written with other tokens.

        Args:
            clear: the blocks have not been written since they were handed out.
        """

    @abstractmethod
    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Note that the served model's blocks were copied (source, destination), in order."""

    def prepare(self, params: SamplingParams) -> PreparedSampling:
        """Return a request's settings for drafting: those that choose tokens, restricted to this
        model's vocabulary, without log-probabilities."""
        own = range(self._vocab_size)
        return PreparedSampling(
            replace(
                params,
                logprobs=None,
                logprob_token_ids=(),
                prompt_logprobs=None,
                logit_bias=tuple(entry for entry in params.logit_bias if entry[0] in own),
                bad_words=tuple(w for w in params.bad_words if all(t in own for t in w)),
            ),
            self._vocab_size,
        )

    def make(self, rows: Sequence[DraftRow]) -> list[Made]:
        """Call ``propose``; a fault costs only the drafts of the request that caused it."""
        if self._num_faults >= _MOST_FAULTS or not rows:
            return [Made()] * len(rows)
        if len(rows) > 1 and self._num_shared_faults >= _MOST_FAULTS:
            # several rows together fail, whichever request is the cause
            return [self.make([row])[0] for row in rows]
        try:
            counts = self.propose(rows)
        except Exception as error:
            if len(rows) > 1:
                if not self._num_shared_faults:
                    _log.warning("draft_fault rows=%d", len(rows), exc_info=error)
                self._num_shared_faults += 1
                # drafting for each row alone shows which one fails
                return [self.make([row])[0] for row in rows]
            self._num_faults += 1
            _log.warning(
                "draft_fault request=%s is not drafted any more: %r", rows[0].request_id, error
            )
            if self._num_faults == _MOST_FAULTS:
                _log.error(
                    "draft_model_off faults=%d: nothing is drafted by it any more",
                    _MOST_FAULTS,
                    exc_info=error,
                )
            return [Made(failed=True)]
        self._num_faults = 0
        if len(rows) > 1:
            self._num_shared_faults = 0
        return list(map(Made, counts, self.caught_up, self.behind))
