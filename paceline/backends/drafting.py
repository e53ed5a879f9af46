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

This module does not know plans, grammars, or how many guesses are worth their time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.backends.sampling import PreparedSampling, SampleRow
from paceline.backends.steps import AttentionBatch, Likeliest, LoadedModel, Logits, Sampler

__all__ = ["DraftModel", "DraftPlan", "DraftRow", "Drafting", "draw"]

# tokens that are made up for in one step at most, computed or copied: a request that comes to be
# guessed behind a long prompt delays no step by more than that
_COMPUTED: Final = 128
_COPIED: Final = 2048

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
    sampling: PreparedSampling
    num_prompt_tokens: int


class Drafting(Protocol):
    """What makes guesses inside a step. Called from one thread, between steps of the served
    model."""

    def guess(self, rows: Sequence[DraftRow]) -> list[int]:
        """Write up to ``count`` guesses behind the last known token of each row, and return how
        many. Rows that there is far to make up for get none for now."""
        ...

    def forget(self, block_ids: Sequence[int], *, clear: bool = False) -> None:
        """These blocks are about to hold something else.

        Args:
            clear: nobody has written them yet.
        """
        ...

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The served model's blocks were copied (source, destination), in order."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What will make guesses, about to be loaded."""

    # of its KV cache, for each block of the served model's
    block_bytes: int
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
) -> list[int]:
    """Draw the next guess of each row in ``going`` from its logits, write it, and count it in
    ``made``. Returns the places in ``going`` of rows that want another."""
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
        if not finite or token_id < 0:
            continue
        made[r] += 1
        rows[r].tokens[rows[r].last + made[r]] = token_id
        if made[r] < rows[r].count:
            stays.append(place)
    return stays


class DraftModel:
    """A ``Drafting``: a loaded model and what its blocks hold.

    Args:
        num_blocks: of the served model's pool.
        mirror: None: blocks are computed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        mirror: Mirror | None = None,
    ) -> None:
        self.model = loaded.model
        self._sampler = loaded.sampler
        self._block_size = block_size
        self._mirror = mirror
        # by block, so many of its first positions are there
        self._held = np.zeros(num_blocks, dtype=np.int64)

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
        # rows, and where each goes on
        going = self._make_up(rows)
        while going:
            logits, likeliest = self._forward(rows, going, made)
            if self._mirror is None and not made[going[0][0]]:
                for r, _ in going:
                    self._note(rows[r], rows[r].last + 1)
            chosen = [r for r, _ in going]
            stays = draw(self._sampler, logits, likeliest, rows, chosen, made)
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
            until = min(row.last, start + left)
            left -= until - start
            if self._mirror is not None and until > start:
                size = self._block_size
                self._mirror(row.table[start // size : -(-until // size)].astype(np.int64))
                self._note(row, until)
            elif until < row.last:
                self._compute(row, start, until - start)
                self._note(row, until)
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
