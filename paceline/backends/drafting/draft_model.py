"""Drafts of a second model, made just before they are verified.

Its KV cache has a block for each block of the served model, under the same number, so requests'
block tables serve both: prefix sharing, copy-on-write, preemption and resuming need nothing more.
The draft positions that a block holds are counted; missing ones are computed before a draft::

    block table     7        3        9
    tokens          abcd     efgh     ij.       j is known, and not computed yet
    held            4        4        0
                                      ^ the draft model continues here: i, j, then its own draft

A block that is handed out, or written by a copy, holds no draft positions. Its content follows from
known tokens alone, and these never change while a request owns the block.

Where the draft model is the served model in other weights, blocks are not computed but copied from
the served model's cache (``mirror``).

Drafts are drawn with the request's own settings and random numbers, as verification draws: two
models with nearly the same logits draw nearly always the same token, at any temperature.

The head may be padded to another number of tokens than the served model's. A request with a token
that the draft model lacks gets no drafts, and a token that the served model lacks is no draft.

A fault costs drafts, never a request: a request that causes one gets no more drafts, and after
a few faults in a row no request does.

This module does not know plans, grammars, or how many drafts are worth their time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.backends.runner.drafting import Drafting, DraftRow
from paceline.backends.runner.interface import (
    AttentionBatch,
    Ints,
    Likeliest,
    LoadedModel,
    Logits,
    Sampler,
)
from paceline.backends.runner.sampling import SampleRow

__all__ = ["DraftModel", "DraftPlan", "draw"]


# missing tokens that one step computes, or copies, at most: a request with a long prompt that
# starts to be drafted delays no step by more than that
_COMPUTED: Final = 128
_COPIED: Final = 2048

# (blocks): copies their positions from the served model's cache
Mirror = Callable[[Ints], None]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A chosen draft model or head, not yet loaded."""

    # bytes of its KV cache for each block of the served model's
    block_bytes: int
    weight_bytes: int
    # description for the log
    described: str
    # (the served model, its blocks) -> the served model to run, and what drafts for it
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
    """Draw the next draft of each row in ``going`` from its logits, write it, and count it in
    ``made``. Returns the indices in ``going`` of rows that want another. A token outside the served
    model's ``vocab_size`` is no draft."""
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
    """A loaded draft model, and how much of each block its KV cache holds.

    Args:
        vocab_size: tokens of its own head.
        served_vocab_size: tokens of the served model's head.
        num_blocks: blocks of the served model's pool.
        mirror: copies blocks from the served model's cache; None: blocks are computed.
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
        """Implement ``Drafting.forget``."""
        self._held[list(block_ids)] = 0
        if clear:
            self.model.clear_blocks(block_ids)

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Implement ``Drafting.copied``. The destinations are computed again before a draft."""
        self.forget([destination for _, destination in pairs], clear=True)

    def propose(self, rows: Sequence[DraftRow]) -> list[int]:
        """Implement ``Drafting.propose``."""
        made = [0] * len(rows)
        self.caught_up, self.behind = [0] * len(rows), [0] * len(rows)
        # (row, first position to compute) of rows that are drafted
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
        """Return the logits behind each row's last token, computed from its start in ``going``."""
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
        """Fill blocks with the known tokens that they lack. Returns the rows to draft in this step,
        each with the first position that the model must compute."""
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
                # missing positions that are computed go into one pass with the last token
                going.append((r, start if self._mirror is None else until))
        return going

    def _start(self, row: DraftRow) -> int:
        """Return how many leading positions of a row its blocks hold."""
        size = self._block_size
        held = self._held[row.table[: row.last // size + 1]]
        partial = np.flatnonzero(held < size)
        full = int(partial[0]) if len(partial) else len(held)
        rest = int(held[full]) if full < len(held) else 0
        return min(row.last, full * size + rest)

    def _note(self, row: DraftRow, until: int) -> None:
        """Record that the blocks hold the row's positions before ``until``."""
        full, rest = divmod(until, self._block_size)
        self._held[row.table[:full]] = self._block_size
        if rest:
            block = row.table[full]
            self._held[block] = max(self._held[block], rest)

    def _compute(self, row: DraftRow, start: int, count: int) -> None:
        """Compute positions of known tokens, without sampling."""
        if not count:
            return
        positions = np.arange(start, start + count)
        batch = AttentionBatch(
            np.array([start]), np.array([count]), row.table[None, :].astype(np.int64)
        )
        nothing = np.empty(0, dtype=np.int64)
        tokens = row.tokens[positions].astype(np.int64)
        self.model.forward(tokens, positions, batch, nothing, needs_logits=False)
