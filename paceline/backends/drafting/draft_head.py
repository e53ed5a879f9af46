"""Drafts of a head that reads the served model's hidden states (EAGLE-3, MTP layers).

The served model's steps produce hidden states of their tokens, its *features*. The head has a KV
cache of its own under the same block numbers, and the entries that a block holds are counted, as in
``drafting``::

    block table     7        3        9
    tokens          abcd     efgh     ij.       j is known, and not computed yet
    held            4        2        0
    features                   gh     i         of positions that the served model has computed
                               ^ the head continues here: g, h and i, then its own draft

The head's entry of a position is computed from the features there and the token *behind* it, and
from nothing before. So entries missing at the beginning (a prefix computed by steps whose features
were not kept, or blocks swapped in from host memory) only shorten what the head attends to: it
begins at the first block from which on all entries exist. An entry made from a draft is overwritten
when the token is known.

Each of several MTP layers but the first also reads the output of the layer before it for the
previous position. Where another request computed that position, at the end of a shared block, such
drafts are worse; answers never change.

The last entry of a block that two requests share depends on the token that follows the block, which
may differ between them. So it is entered again for a request whose next token differs, as long as
the features of that position are kept.

This module does not know plans, formats of heads, or how many drafts are worth their time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from paceline.backends.drafting.draft_model import draw
from paceline.backends.runner.drafting import Drafting, DraftRow
from paceline.backends.runner.interface import (
    AttentionBatch,
    Ints,
    Likeliest,
    Logits,
    Sampler,
    StepModel,
)
from paceline.core.outputs import BlockSwap

__all__ = ["FeatureModel", "FeatureTap", "HeadDraft", "HeadModel"]

_log = logging.getLogger(__name__)

# rows of a step beyond which features are not kept: the scheduler gives no drafts where more
# requests run
_MOST_ROWS: Final = 8
# tokens whose features are kept, of all requests: how far back the head can see in a new prompt
_KEPT: Final = 1024
# missing entries that one step computes at most
_COMPUTED: Final = 256

# [tokens, numbers], an array of the served model's kind; it has a length and can be sliced
Features: TypeAlias = Any


class HeadModel(Protocol):
    """A loaded head and its KV cache, similar to ``interface.StepModel``. Logits are over the
    served model's vocabulary, valid until the next call."""

    def start(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        features: Sequence[Features],
        sampled: Ints,
    ) -> Logits:
        """Enter T positions whose features are known; ``features`` holds them in pieces.

        Args:
            token_ids: [T], the tokens that follow the positions.
            positions: [T], of the whole request; those of ``batch`` count from the head's first.
            sampled: [S], the tokens whose logits are wanted; may be empty.
        """

    def go_on(self, token_ids: Ints, positions: Ints, batch: AttentionBatch, rows: Ints) -> Logits:
        """Enter the next position of rows that the last call returned logits for, from the head's
        own output. ``rows`` are indices into those logits."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def clear_blocks(self, block_ids: Sequence[int]) -> None: ...


class FeatureModel(StepModel, Protocol):
    """A served model that exposes its hidden states."""

    # layers whose input is kept in each step, in order; num_layers means the last layer's output
    feature_layers: tuple[int, ...]

    @property
    def features(self) -> Features:
        """Features of all tokens of the last step, with the layers concatenated."""


class _Block:
    """Features of a block's positions from ``first`` to before ``end``."""

    __slots__ = ("end", "first", "pieces")

    def __init__(self, first: int, end: int, pieces: list[Features]) -> None:
        self.first, self.end, self.pieces = first, end, pieces

    def add(self, offset: int, piece: Features) -> None:
        """Add the features from ``offset`` on; older ones from there on are dropped."""
        if not self.first <= offset <= self.end:
            self.pieces, self.first, self.end = [], offset, offset
        while self.end > offset:
            last = self.pieces.pop()
            left = len(last) - (self.end - offset)
            self.end -= len(last)
            if left > 0:
                self.pieces.append(last[:left])
                self.end += left
        self.pieces.append(piece)
        self.end += len(piece)

    def between(self, first: int, end: int) -> list[Features]:
        """Return the features kept for positions from ``first`` to before ``end``."""
        found, at = [], self.first
        for piece in self.pieces:
            low, high = max(first - at, 0), min(end - at, len(piece))
            if low < high:
                found.append(piece[low:high])
            at += len(piece)
        return found


class _Reach(NamedTuple):
    """Positions of a row that the head can attend to."""

    # its first position, at the start of a block
    first: int
    # first position to enter
    begin: int


class _Part(NamedTuple):
    """Positions of a row to enter."""

    row: DraftRow
    # first position that the head sees
    first: int
    begin: int
    until: int


class HeadDraft(Drafting):
    """A loaded head, and the entries that its blocks hold. Called from one thread, between steps.

    Args:
        sampler, vocab_size: the served model's.
        num_blocks: blocks of the served model's pool.
    """

    def __init__(
        self,
        model: HeadModel,
        sampler: Sampler,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        super().__init__(
            sampler, vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size
        )
        self.model = model
        # token behind the last entered position, by block id
        self._behind = np.zeros(num_blocks, dtype=np.int64)
        # features by block id, the block written last at the end
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._most_blocks = max(2 * _MOST_ROWS, _KEPT // block_size)
        # features of the last position of blocks that are entered whole, the newest at the end
        self._ends: OrderedDict[int, Features] = OrderedDict()

    # ------------------------------------------------------------------ the served model's steps

    def take(self, batch: AttentionBatch, features: Features) -> None:
        """Keep the features of a step of the served model."""
        size, at = self._block_size, 0
        for start, count, table in zip(
            batch.starts.tolist(), batch.counts.tolist(), batch.block_tables, strict=True
        ):
            last = (start + count - 1) // size
            for index in range(max(start // size, last + 1 - self._most_blocks), last + 1):
                low, high = max(start, index * size), min(start + count, (index + 1) * size)
                # a copy: a slice would keep the features of the whole step
                piece = features[[*range(at + low - start, at + high - start)]]
                block = self._blocks.setdefault(int(table[index]), _Block(0, 0, []))
                block.add(low - index * size, piece)
                self._blocks.move_to_end(int(table[index]))
            at += count
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def lose(self) -> None:
        """Drop features after a step that was not observed, since blocks may hold other tokens now.
        Blocks that are entered whole keep theirs: their tokens do not change."""
        self._blocks.clear()

    def forget(self, block_ids: Sequence[int], *, clear: bool = False) -> None:
        """Implement ``Drafting.forget``."""
        self._held[list(block_ids)] = 0
        for block_id in block_ids:
            self._blocks.pop(block_id, None)
            self._ends.pop(block_id, None)
        if clear:
            self.model.clear_blocks(block_ids)

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Implement ``Drafting.copied``. Features cannot be made again, so they are copied."""
        self.model.copy_blocks(pairs)
        for source, destination in pairs:
            self._held[destination] = self._held[source]
            self._behind[destination] = self._behind[source]
            self._blocks.pop(destination, None)
            block = self._blocks.get(source)
            if block is not None:
                self._blocks[destination] = _Block(block.first, block.end, list(block.pieces))
            if source in self._ends:
                self._keep_end(destination, self._ends[source])

    # ------------------------------------------------------------------ drafts

    def propose(self, rows: Sequence[DraftRow]) -> list[int]:
        """Implement ``Drafting.propose``. Rows of which the head sees nothing, or that lack many
        entries, get none for now."""
        made = [0] * len(rows)
        self.caught_up, self.behind = [0] * len(rows), [0] * len(rows)
        # (row, first position that the head sees) of rows that are drafted
        going, logits, entered = self._enter(rows)
        while going:
            chosen = [r for r, _ in going]
            stays = draw(self._sampler, logits, None, rows, chosen, made, self._vocab_size)
            going = [going[place] for place in stays]
            if going:
                logits = self._go_on(rows, going, made, np.array(stays))
        # noted last: a row whose draft failed must fail again when it is drafted alone
        for row, begin, until in entered:
            self._note(row, begin, until)
        return made

    def _enter(
        self, rows: Sequence[DraftRow]
    ) -> tuple[list[tuple[int, int]], Logits, list[tuple[DraftRow, int, int]]]:
        """Enter the known tokens of all rows. Returns (row, first position) of rows that are then
        complete, their logits, and the positions entered now."""
        left = _COMPUTED
        going: list[tuple[int, int]] = []
        taken: list[_Part] = []
        for r, row in enumerate(rows):
            reach = self._reach(row)
            if reach is None:
                continue
            until = min(row.last, reach.begin + left)
            left -= until - reach.begin
            # the last position is entered with every draft
            known = until == row.last
            self.caught_up[r] = until - reach.begin - known
            self.behind[r] = 0 if known else row.last - until - 1
            if until == reach.begin:
                continue
            taken += self._of_others(row, reach)
            taken.append(_Part(row, reach.first, reach.begin, until))
            if known:
                going.append((r, reach.first))
        if not taken:
            return [], None, []
        tokens = [row.tokens[begin + 1 : until + 1] for row, _, begin, until in taken]
        positions = [np.arange(begin, until) for _, _, begin, until in taken]
        ends = np.cumsum([len(each) for each in positions])
        whole = [index for index, part in enumerate(taken) if part.until == part.row.last]
        logits = self.model.start(
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            self._batch(taken),
            [piece for part in taken for piece in self._pieces(part)],
            ends[whole] - 1,
        )
        return going, logits, [(row, begin, until) for row, _, begin, until in taken]

    def _of_others(self, row: DraftRow, reach: _Reach) -> list[_Part]:
        """Return last positions of whole blocks that another request entered with a different token
        behind them. Where two such rows are drafted in one step, both see the later row's entry."""
        size = self._block_size
        low, high = reach.first // size, reach.begin // size
        blocks = row.table[low:high]
        follows = row.tokens[(low + 1) * size : high * size + 1 : size]
        others = np.flatnonzero(self._behind[blocks] != follows).tolist()
        return [
            _Part(row, reach.first, (low + place + 1) * size - 1, (low + place + 1) * size)
            for place in others
            if int(blocks[place]) in self._ends
        ]

    def _go_on(
        self,
        rows: Sequence[DraftRow],
        going: Sequence[tuple[int, int]],
        made: Sequence[int],
        samples_at: Ints,
    ) -> Logits:
        """Return the logits behind each row's last draft."""
        at = [rows[r].last - 1 + made[r] for r, _ in going]
        tokens = [rows[r].tokens[position + 1] for (r, _), position in zip(going, at, strict=True)]
        parts = [
            _Part(rows[r], first, position, position + 1)
            for (r, first), position in zip(going, at, strict=True)
        ]
        return self.model.go_on(
            np.array(tokens, dtype=np.int64), np.array(at), self._batch(parts), samples_at
        )

    def _batch(self, parts: Sequence[_Part]) -> AttentionBatch:
        """Return the attention batch of positions to enter, counted from the head's first one."""
        size = self._block_size
        widths = [(until - 1) // size + 1 - first // size for _, first, _, until in parts]
        tables = np.zeros((len(parts), max(widths)), dtype=np.int64)
        for place, ((row, first, _, _), width) in enumerate(zip(parts, widths, strict=True)):
            tables[place, :width] = row.table[first // size : first // size + width]
        return AttentionBatch(
            np.array([begin - first for _, first, begin, _ in parts]),
            np.array([until - begin for _, _, begin, until in parts]),
            tables,
        )

    def _reach(self, row: DraftRow) -> _Reach | None:
        """Return what to enter, or None where the head sees nothing of the row or nothing is new.

        Walks back from the row's end over blocks to be entered, then over blocks that are full."""
        size, high = self._block_size, row.last
        begin: int | None = None
        index = (row.last - 1) // size
        while index >= 0:
            block_id, low = int(row.table[index]), index * size
            held = int(self._held[block_id])
            if 0 < held < size and self._behind[block_id] != row.tokens[low + held]:
                # a copy of another request's block, whose last entry was made with another token
                held -= 1
            if low + held >= high:
                if begin is None and held == size and block_id in self._ends:
                    # entered by other requests: enter the last position again, for the next token
                    begin = high - 1
                    index -= 1
                break
            block = self._blocks.get(block_id)
            if block is None or block.first > held or low + block.end < high:
                break
            begin, high = low + held, low
            index -= 1
            if held:
                # entries before these exist, since blocks are entered in order
                break
        if begin is None:
            return None
        full = np.flatnonzero(self._held[row.table[: index + 1]] < size)
        before = int(full[-1]) + 1 if len(full) else 0
        return _Reach(before * size, begin)

    def _pieces(self, part: _Part) -> list[Features]:
        row, _, begin, until = part
        size, found = self._block_size, list[Features]()
        for index in range(begin // size, (until - 1) // size + 1):
            block_id, low = int(row.table[index]), index * size
            if self._held[block_id] == size:
                found.append(self._ends[block_id])
            else:
                found += self._blocks[block_id].between(begin - low, until - low)
        return found

    def _keep_end(self, block_id: int, features: Features) -> None:
        self._ends[block_id] = features
        self._ends.move_to_end(block_id)
        while len(self._ends) > _KEPT:
            self._ends.popitem(last=False)

    def _note(self, row: DraftRow, begin: int, until: int) -> None:
        """Record that the row's positions from ``begin`` to before ``until`` are entered."""
        size = self._block_size
        for index in range(begin // size, (until - 1) // size + 1):
            block_id, end = int(row.table[index]), min(until, (index + 1) * size)
            self._held[block_id] = end - index * size
            self._behind[block_id] = row.tokens[end]
            if end == (index + 1) * size and (block := self._blocks.pop(block_id, None)):
                self._keep_end(block_id, block.between(size - 1, size)[0])


class FeatureTap:
    """A ``interface.StepModel`` that runs the served model and passes its features to a head."""

    def __init__(self, model: FeatureModel, layers: tuple[int, ...], draft: HeadDraft) -> None:
        self.served = model
        self._layers = layers
        self._draft = draft

    @property
    def likeliest(self) -> Likeliest:
        return self.served.likeliest

    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        sampled: Ints,
        *,
        needs_logits: bool = True,
    ) -> Logits:
        listens = len(batch.counts) <= _MOST_ROWS
        self.served.feature_layers = self._layers if listens else ()
        logits = self.served.forward(
            token_ids, positions, batch, sampled, needs_logits=needs_logits
        )
        if not listens:
            self._draft.lose()
            return logits
        try:
            self._draft.take(batch, self.served.features)
        except Exception as error:
            # a fault here costs drafts, not the step
            _log.warning("draft_fault features=%d", len(token_ids), exc_info=error)
            self._draft.lose()
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.served.copy_blocks(pairs)

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        self.served.swap_blocks(swaps)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self.served.clear_blocks(block_ids)
