"""Guesses of a second model, made just before they are verified.

Its KV cache has a block for each block of the served model, under the same number, so that block
tables are those of the requests: prefix sharing, copy-on-write, preemption and resuming need
nothing more. What a block holds of it is counted, and made up for when a request is next guessed::

    block table     7        3        9
    tokens          abcd     efgh     ij.       j is known, and not computed yet
    held            4        4        0
                                      ^ here the draft model goes on: i and j, then its own guess

A block that is handed out, or written by a copy, holds nothing. What it holds follows from known
tokens alone, and these never change while the block is somebody's.

Where it is the served model itself in other weights, blocks are not computed but copied from the
served model's cache (``mirror``).

Guesses are drawn with the request's own settings and random numbers, as verification draws: of two
models that say nearly the same the draws are nearly always the same, at any temperature.

The head may be padded to another number of tokens than the served model's. A request that holds a
token which this model lacks is not guessed, and a token which the served one lacks is no guess.

A fault costs guesses and no request: whoever causes it is not guessed any more, and after some in a
row, by whomever, none is.

This module does not know plans, grammars, or how many guesses are worth their time.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.backends.sampling import PreparedSampling, SampleRow
from paceline.backends.steps import AttentionBatch, Likeliest, LoadedModel, Logits, Sampler
from paceline.core.sampling_params import SamplingParams

__all__ = ["DraftModel", "DraftPlan", "DraftRow", "Drafting", "Made", "draw"]

_log = logging.getLogger(__name__)

# tokens that are made up for in one step at most, computed or copied: a request that comes to be
# guessed behind a long prompt delays no step by more than that
_COMPUTED: Final = 128
_COPIED: Final = 2048
# faults of single requests without a guess between them, after which the model is not asked again
_MOST_FAULTS: Final = 3

# (blocks): copies what the served model's cache holds of them
Mirror = Callable[[NDArray[np.int64]], None]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRow:
    """A request that is to be guessed."""

    # [longest request]: known tokens, and places for guesses, which are written here
    tokens: NDArray[np.int32]
    # [longest request's blocks]: block ids by position // block_size, there for every guess but the
    # last
    table: NDArray[np.int32]
    # position of the last known token, the only one that the served model has not computed
    last: int
    # guesses wanted, at least 1
    count: int
    # of ``Drafting.prepare``
    sampling: PreparedSampling
    num_prompt_tokens: int
    # for the log
    request_id: str = ""


class Made(NamedTuple):
    """What became of a row."""

    # guesses that were written
    num_guesses: int = 0
    # known tokens that the model had not seen and took in
    caught_up: int = 0
    # known tokens that it has to take in before it guesses
    behind: int = 0
    # it failed, and would again
    failed: bool = False


class Drafting(ABC):
    """What makes guesses inside a step. Called from one thread, between steps of the served model.

    Args:
        sampler: draws its guesses.
        vocab_size: tokens that it knows.
        num_blocks: of the served model's pool.
    """

    def __init__(
        self, sampler: Sampler, *, vocab_size: int, num_blocks: int, block_size: int
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._block_size = block_size
        # by block, so many of its first positions are there
        self._held = np.zeros(num_blocks, dtype=np.int64)
        # of each row of the last ``guess``, known tokens that were taken in, and that are to be
        self.caught_up: list[int] = []
        self.behind: list[int] = []
        # in a row, of single requests, and of several together
        self._num_faults = self._num_shared_faults = 0

    @abstractmethod
    def guess(self, rows: Sequence[DraftRow]) -> list[int]:
        """Write up to ``count`` guesses behind the last known token of each row, and return how
        many. Rows that there is far to make up for get none for now, see ``behind``."""

    @abstractmethod
    def forget(self, block_ids: Sequence[int], *, clear: bool = False) -> None:
        """These blocks are about to hold something else.

        Args:
            clear: nobody has written them yet.
        """

    @abstractmethod
    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The served model's blocks were copied (source, destination), in order."""

    def prepare(self, params: SamplingParams) -> PreparedSampling:
        """A request's settings to guess with: those that choose its tokens, as far as these are
        known here, and none of what is told about a token."""
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
        """``guess``, whatever happens: a fault costs the guesses of the request that it is of."""
        if self._num_faults >= _MOST_FAULTS or not rows:
            return [Made()] * len(rows)
        if len(rows) > 1 and self._num_shared_faults >= _MOST_FAULTS:
            # together they fail, whosesoever it is
            return [self.make([row])[0] for row in rows]
        try:
            counts = self.guess(rows)
        except Exception as error:
            if len(rows) > 1:
                if not self._num_shared_faults:
                    _log.warning("draft_fault rows=%d", len(rows), exc_info=error)
                self._num_shared_faults += 1
                # each by itself tells whose it is
                return [self.make([row])[0] for row in rows]
            self._num_faults += 1
            _log.warning(
                "draft_fault request=%s is not guessed any more: %r", rows[0].request_id, error
            )
            if self._num_faults == _MOST_FAULTS:
                _log.error(
                    "draft_model_off faults=%d: nothing is guessed by it any more",
                    _MOST_FAULTS,
                    exc_info=error,
                )
            return [Made(failed=True)]
        self._num_faults = 0
        if len(rows) > 1:
            self._num_shared_faults = 0
        return list(map(Made, counts, self.caught_up, self.behind))


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What will make guesses, about to be loaded."""

    # of its KV cache, for each block of the served model's
    block_bytes: int
    weight_bytes: int
    # for people
    described: str
    # (the served model, its blocks): that model as it is to be run, and what guesses for it
    load: Callable[[LoadedModel, int], tuple[LoadedModel, Drafting]]


def draw(
    sampler: Sampler,
    logits: Logits,
    likeliest: Likeliest,
    rows: Sequence[DraftRow],
    going: Sequence[int],
    made: list[int],
    vocab_size: int,
) -> list[int]:
    """Draw the next guess of each row in ``going`` from its logits, write it, and count it in
    ``made``. Returns the places in ``going`` of rows that want another. What is no token of the
    served model's ``vocab_size`` is no guess."""
    drawn = [
        SampleRow(
            rows[r].sampling,
            rows[r].tokens[: rows[r].last + 1 + made[r]],
            rows[r].num_prompt_tokens,
            None,
        )
        for r in going
    ]
    samples = sampler.sample(logits, drawn, likeliest)
    stays: list[int] = []
    for place, (r, token_id, finite) in enumerate(
        zip(going, samples.token_ids, samples.finite, strict=True)
    ):
        if not finite or not 0 <= token_id < vocab_size:
            continue
        made[r] += 1
        rows[r].tokens[rows[r].last + made[r]] = token_id
        if made[r] < rows[r].count:
            stays.append(place)
    return stays


class DraftModel(Drafting):
    """A ``Drafting``: a loaded model and what its blocks hold.

    Args:
        vocab_size: tokens of its own head.
        served_vocab_size: of the served model's.
        num_blocks: of the served model's pool.
        mirror: None: blocks are computed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        vocab_size: int,
        served_vocab_size: int,
        num_blocks: int,
        block_size: int,
        mirror: Mirror | None = None,
    ) -> None:
        super().__init__(
            loaded.sampler, vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size
        )
        self.model = loaded.model
        self._served_vocab_size = served_vocab_size
        self._mirror = mirror

    def forget(self, block_ids: Sequence[int], *, clear: bool = False) -> None:
        """See ``Drafting``."""
        self._held[list(block_ids)] = 0
        if clear:
            self.model.clear_blocks(block_ids)

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Drafting``. What is lacking is made up for like anything else."""
        self.forget([destination for _, destination in pairs], clear=True)

    def guess(self, rows: Sequence[DraftRow]) -> list[int]:
        """See ``Drafting``."""
        made = [0] * len(rows)
        self.caught_up, self.behind = [0] * len(rows), [0] * len(rows)
        # rows, and where each goes on
        going = self._make_up(rows)
        while going:
            logits, likeliest = self._forward(rows, going, made)
            if self._mirror is None and not made[going[0][0]]:
                for r, _ in going:
                    self._note(rows[r], rows[r].last + 1)
            chosen = [r for r, _ in going]
            stays = draw(
                self._sampler, logits, likeliest, rows, chosen, made, self._served_vocab_size
            )
            chosen = [chosen[place] for place in stays]
            going = [(r, rows[r].last + made[r]) for r in chosen]
        return made

    def _forward(
        self, rows: Sequence[DraftRow], going: Sequence[tuple[int, int]], made: Sequence[int]
    ) -> tuple[Logits, Likeliest]:
        """Logits of what follows each row's last token, from where each goes on."""
        starts = np.array([start for _, start in going])
        ends = np.array([rows[r].last + made[r] + 1 for r, _ in going])
        counts = ends - starts
        width = int(ends.max() - 1) // self._block_size + 1
        positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        tokens = [rows[r].tokens[at] for (r, _), at in zip(going, positions, strict=True)]
        tables = np.stack([rows[r].table[:width] for r, _ in going]).astype(np.int64)
        logits = self.model.forward(
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            AttentionBatch(starts, counts, tables),
            np.cumsum(counts) - 1,
            needs_logits=any(rows[r].sampling.reads_logits for r, _ in going),
        )
        return logits, self.model.likeliest

    def _make_up(self, rows: Sequence[DraftRow]) -> list[tuple[int, int]]:
        """Let blocks hold what they lack of known tokens. Returns the rows that are guessed in this
        step, each with the first position that the model is to compute."""
        going: list[tuple[int, int]] = []
        left = _COMPUTED if self._mirror is None else _COPIED
        for r, row in enumerate(rows):
            start = self._start(row)
            if row.tokens[start : row.last + 1].max() >= self._vocab_size:
                continue
            until = min(row.last, start + left)
            left -= until - start
            if self._mirror is not None and until > start:
                size = self._block_size
                self._mirror(row.table[start // size : -(-until // size)].astype(np.int64))
                self._note(row, until)
            elif until < row.last:
                self._compute(row, start, until - start)
                self._note(row, until)
            self.caught_up[r], self.behind[r] = until - start, row.last - until
            if until == row.last:
                # what is computed goes before the last token in one pass
                going.append((r, start if self._mirror is None else until))
        return going

    def _start(self, row: DraftRow) -> int:
        """How many positions of a row the blocks hold, from its first on."""
        size = self._block_size
        held = self._held[row.table[: row.last // size + 1]]
        partial = np.flatnonzero(held < size)
        full = int(partial[0]) if len(partial) else len(held)
        rest = int(held[full]) if full < len(held) else 0
        return min(row.last, full * size + rest)

    def _note(self, row: DraftRow, until: int) -> None:
        """The row's positions before ``until`` are there."""
        full, rest = divmod(until, self._block_size)
        self._held[row.table[:full]] = self._block_size
        if rest:
            block = row.table[full]
            self._held[block] = max(self._held[block], rest)

    def _compute(self, row: DraftRow, start: int, count: int) -> None:
        """Positions of known tokens, of which nothing is sampled."""
        if not count:
            return
        positions = np.arange(start, start + count)
        batch = AttentionBatch(
            np.array([start]), np.array([count]), row.table[None, :].astype(np.int64)
        )
        nothing = np.empty(0, dtype=np.int64)
        tokens = row.tokens[positions].astype(np.int64)
        self.model.forward(tokens, positions, batch, nothing, needs_logits=False)
