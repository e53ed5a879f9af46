"""What a head sees of a request: all that was kept, nothing of another one, nothing out of date.

The head here is one of integers: an entry is made of a position's feature and of the token behind
it, and a guess is the sum of all entries that it sees. So a slot that holds something else shows as
a wrong guess. The feature of a position is a number made of all tokens up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.drafting import draft_head
from paceline.backends.drafting.draft_head import FeatureTap, HeadDraft
from paceline.backends.runner.drafting import DraftRow
from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.runner.sampling import SampleRow
from paceline.core.outputs import BlockSwap
from tests.backends.draft_rows import BLOCKS, SIZE, VOCAB, Likeliest, draft_row, drafts_of


def _feature(tokens: Sequence[int], position: int) -> int:
    return sum(token * (at + 3) for at, token in enumerate(tokens[: position + 1])) % 1009


def _entry(position: int, feature: int, token: int) -> int:
    return (position + 1) * (7 * feature + 13 * token + 1)


def _expected(tokens: Sequence[int], first: int, count: int) -> list[int]:
    """Guesses behind ``tokens`` by what is seen from ``first`` on."""
    last = len(tokens) - 1
    total = sum(_entry(p, _feature(tokens, p), tokens[p + 1]) for p in range(first, last))
    found = [total % VOCAB]
    while len(found) < count:
        position = last + len(found) - 1
        total += _entry(position, total % 1009, found[-1])
        found.append(total % VOCAB)
    return found


class _Head:
    """A ``HeadModel``; what nobody wrote is nonsense."""

    def __init__(self) -> None:
        self.cache = np.full((BLOCKS, SIZE), 7_000_003)
        self.calls: list[int] = []
        self._last = np.empty(0, dtype=np.int64)

    def start(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        features: Sequence[NDArray[np.int64]],
        sampled: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        known = np.concatenate(features)
        assert len(known) == len(token_ids)
        return self._enter(token_ids, positions, batch, known, sampled)

    def go_on(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        rows: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        known = self._last[rows] % 1009
        return self._enter(token_ids, positions, batch, known, np.arange(len(rows)))

    def _enter(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        known: NDArray[np.int64],
        sampled: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        self.calls.append(len(token_ids))
        found, at = [], 0
        for start, count, table in zip(batch.starts, batch.counts, batch.block_tables, strict=True):
            for place in range(start, start + count):
                entry = _entry(int(positions[at]), int(known[at]), int(token_ids[at]))
                self.cache[table[place // SIZE], place % SIZE] = entry
                at += 1
            if at - 1 in sampled:
                seen = [self.cache[table[p // SIZE], p % SIZE] for p in range(start + count)]
                found.append(int(sum(seen)))
        assert len(found) == len(sampled)
        self._last = np.array(found, dtype=np.int64)
        return self._last % VOCAB

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.cache[destination] = self.cache[source]

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self.cache[list(block_ids)] = 7_000_003


class _Served:
    """A ``FeatureModel`` that knows each row's tokens by its first block."""

    likeliest: NDArray[np.int32] | None = None

    def __init__(self) -> None:
        self.feature_layers: tuple[int, ...] = ()
        self.tokens: dict[int, list[int]] = {}
        self.features: Any = None

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        sampled: NDArray[np.int64],
        *,
        needs_logits: bool = True,
    ) -> None:
        found = [
            _feature(self.tokens[row], position)
            for row, (start, count) in enumerate(
                zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)
            )
            for position in range(start, start + count)
        ]
        self.features = np.array(found) if self.feature_layers else None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None: ...

    def clear_blocks(self, block_ids: Sequence[int]) -> None: ...


class _Rig:
    def __init__(self) -> None:
        self.head, self.served = _Head(), _Served()
        self.draft = HeadDraft(
            self.head, Likeliest(), vocab_size=VOCAB, num_blocks=BLOCKS, block_size=SIZE
        )
        self.tap = FeatureTap(self.served, (0, 1), self.draft)

    def step(self, *rows: tuple[Sequence[int], int, Sequence[int]]) -> None:
        """A step of the served model; of each row its tokens, from where on, and its blocks."""
        self.served.tokens = {n: list(tokens) for n, (tokens, _, _) in enumerate(rows)}
        width = max(len(blocks) for _, _, blocks in rows)
        tables = np.zeros((len(rows), width), dtype=np.int64)
        for n, (_, _, blocks) in enumerate(rows):
            tables[n, : len(blocks)] = blocks
        starts = np.array([start for _, start, _ in rows])
        counts = np.array([len(tokens) - start for tokens, start, _ in rows])
        nothing = np.empty(0, dtype=np.int64)
        self.tap.forward(nothing, nothing, AttentionBatch(starts, counts, tables), nothing)

    def propose(self, *rows: DraftRow) -> list[int]:
        return self.draft.propose(rows)


def test_guesses_are_what_the_head_says() -> None:
    rig = _Rig()
    first, second = [3, 5, 8, 13, 2, 6], [1] * 9
    rig.step((first[:-1], 0, [9, 4, 1]), (second[:-1], 0, [20, 7, 30, 31]))
    rows = (
        draft_row(first, [9, 4, 1]),
        draft_row(second, [20, 7, 30, 31], 2),
        draft_row([6], [50], 1),
    )
    # nothing is known before a single token
    assert rig.propose(*rows) == [4, 2, 0]
    assert drafts_of(rows[0], 4) == _expected(first, 0, 4)
    assert drafts_of(rows[1], 2) == _expected(second, 0, 2)
    assert rig.head.calls == [5 + 8, 2, 1, 1]


def test_positions_are_entered_once_and_wrong_guesses_are_written_over() -> None:
    rig = _Rig()
    tokens, blocks = [3, 5, 8, 13, 2], list(range(10, 40))
    rig.step((tokens[:-1], 0, blocks))
    (made,) = rig.propose(row := draft_row(tokens, blocks))
    right = drafts_of(row, made)
    for kept in (2, 0, 4, 1, 3):
        rig.head.calls.clear()
        # verified: some are right, the next is another
        rig.step(([*tokens, *right], len(tokens) - 1, blocks))
        tokens = [*tokens, *right[:kept], (right[kept % 4] + 1) % VOCAB]
        row = draft_row(tokens, blocks)
        assert rig.propose(row) == [4]
        # features of wrong guesses are out of date, and so are the head's own entries
        assert drafts_of(row, 4) == _expected(tokens, 0, 4)
        assert rig.head.calls == [kept + 1, 1, 1, 1]
        right = drafts_of(row, 4)


class _Unlucky(Likeliest):
    """Fails over a token."""

    def sample(self, logits: Any, rows: Sequence[SampleRow], likeliest: Any = None) -> Any:
        if any(13 in row.tokens for row in rows):
            raise RuntimeError("unlucky")
        return super().sample(logits, rows, likeliest)


def test_a_row_that_fails_is_found_and_the_others_go_on() -> None:
    rig = _Rig()
    rig.draft = HeadDraft(
        rig.head, _Unlucky(), vocab_size=VOCAB, num_blocks=BLOCKS, block_size=SIZE
    )
    rig.tap = FeatureTap(rig.served, (0, 1), rig.draft)
    lucky, unlucky = [3, 5, 8, 2], [13] * 4
    rig.step((lucky[:-1], 0, [9, 4]), (unlucky[:-1], 0, [20, 7]))
    rows = draft_row(lucky, [9, 4], 1), draft_row(unlucky, [20, 7], 1)
    made = rig.draft.make(rows)
    assert [(row.num_drafted, row.failed) for row in made] == [(1, False), (0, True)]
    assert drafts_of(rows[0], 1) == _expected(lucky, 0, 1)


def test_hidden_states_that_cannot_be_kept_cost_guesses_and_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = _Rig()

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rig.draft, "take", fails)
    rig.step(([3, 5, 8], 0, [9, 4]))
    assert rig.propose(draft_row([3, 5, 8, 2], [9, 4])) == [0]


def test_what_is_missing_shortens_what_is_seen() -> None:
    rig = _Rig()
    tokens, blocks = [(i * 37) % VOCAB for i in range(30)], list(range(10))
    # the first seven positions are in the prefix cache, and nobody listened when they came there
    rig.step((tokens[:20], 7, blocks))
    row = draft_row(tokens[:21], blocks)
    assert rig.propose(row) == [4]
    # from the first whole block on
    assert drafts_of(row, 4) == _expected(tokens[:21], 8, 4)
    # a step with too many rows is not listened to, and what was kept may be of other tokens
    others = [([1, 2], 0, [40 + n]) for n in range(8)]
    rig.step((tokens[:23], 20, blocks), *others)
    assert rig.propose(draft_row(tokens[:24], blocks)) == [0]
    rig.step((tokens[:24], 23, blocks))
    # not yet: the beginning of that block is missing
    assert rig.propose(draft_row(tokens[:25], blocks)) == [0]
    rig.step((tokens[:27], 24, blocks))
    row = draft_row(tokens[:28], blocks)
    assert rig.propose(row) == [4]
    assert drafts_of(row, 4) == _expected(tokens[:28], 24, 4)


def test_a_long_prompt_is_made_up_for_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "_COMPUTED", 30)
    rig = _Rig()
    tokens, blocks = [(i * 37) % VOCAB for i in range(100)], list(range(30))
    rig.step((tokens[:60], 0, blocks))
    rig.step((tokens[:99], 60, blocks), ([5, 6, 7], 0, [60]))
    row, waits = draft_row(tokens, blocks), draft_row([5, 6, 7, 8], [60, 61], 1)
    found, told = [], []
    for _ in range(4):
        found.append(rig.propose(row, waits)[0])
        told.append((rig.draft.caught_up, rig.draft.behind))
    assert found == [0, 0, 0, 4]
    # a row that waits for its turn has none; the last position comes with every guess
    assert told[0] == ([30, 0], [68, 2]) and told[2] == ([30, 0], [8, 2])
    assert told[3] == ([8, 2], [0, 0])
    assert drafts_of(row, 4) == _expected(tokens, 0, 4)
    assert rig.head.calls == [30, 30, 30, 9 + 3, 1, 1, 1]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _Rig()
    monkeypatch.setattr(rig.draft, "_most_blocks", 5)
    tokens, blocks = [(i * 37) % VOCAB for i in range(61)], list(range(16))
    rig.step((tokens[:-1], 0, blocks))
    assert len(rig.draft._blocks) == 5
    row = draft_row(tokens, blocks)
    assert rig.propose(row) == [4]
    assert drafts_of(row, 4) == _expected(tokens, 40, 4)
    # entered whole, they are kept no more, but for the position whose entry others may want anew
    assert not rig.draft._blocks
    assert [len(features) for features in rig.draft._ends.values()] == [1] * 5
    monkeypatch.setattr(draft_head, "_KEPT", 3)
    rig.step(([*tokens, 1, 2, 3], 60, blocks))
    rig.propose(draft_row([*tokens, 1, 2, 3, 4], blocks, 1))
    assert list(rig.draft._ends) == [13, 14, 15]


def test_features_of_a_long_step_are_not_kept_for_a_few_positions() -> None:
    rig = _Rig()
    tokens = [(i * 37) % VOCAB for i in range(61)]
    rig.step((tokens[:-1], 0, list(range(16))))
    row = draft_row(tokens, list(range(16)))
    rig.propose(row)
    rig.step(([*tokens, 5], 60, list(range(16))))
    kept = [piece for block in rig.draft._blocks.values() for piece in block.pieces]
    kept += rig.draft._ends.values()
    assert len(kept) == 16
    # what each holds of memory is its own numbers
    assert all(piece.base is None or piece.base.nbytes <= 8 * SIZE for piece in kept)


def test_a_shared_block_s_last_entry_is_that_of_whoever_is_guessed() -> None:
    rig = _Rig()
    first = [3, 5, 8, 13, 2, 6, 1, 9, 4]
    # the same two blocks, and then another token
    second = [*first[:8], 7, 11]
    rig.step((first, 0, [9, 4, 1]))
    rig.step((second[:-1], 8, [9, 4, 20]))
    row = draft_row([*first, 30], [9, 4, 1])
    assert rig.propose(row) == [4]
    for _ in range(2):
        rig.head.calls.clear()
        row = draft_row(second, [9, 4, 20])
        assert rig.propose(row) == [4]
        assert drafts_of(row, 4) == _expected(second, 0, 4)
        # one position of the other's, and its own
        assert rig.head.calls == [2, 1, 1, 1]
        second = [*second, 12]
        rig.step((second[:-1], len(second) - 2, [9, 4, 20]))
        first = [*first, 30]
        rig.step((first, len(first) - 1, [9, 4, 1]))
        row = draft_row([*first, 31], [9, 4, 1])
        assert rig.propose(row) == [4]
        assert drafts_of(row, 4) == _expected([*first, 31], 0, 4)


def test_a_prompt_that_others_entered_whole_is_guessed_at_once() -> None:
    rig = _Rig()
    first = [3, 5, 8, 13, 2, 6, 1, 9, 4, 10]
    rig.step((first[:-1], 0, [9, 4, 1]))
    rig.propose(draft_row(first, [9, 4, 1]))
    # eight of nine tokens are in the prefix cache
    second = [*first[:8], 77]
    rig.step((second, 8, [9, 4, 20]))
    row = draft_row(second, [9, 4, 20])
    assert rig.propose(row) == [4]
    assert drafts_of(row, 4) == _expected(second, 0, 4)


def test_a_fork_s_copy_has_its_own_last_entry() -> None:
    rig = _Rig()
    parent = [3, 5, 8, 13, 2, 6]
    rig.step((parent, 0, [9, 4]))
    parent = [*parent, 1]
    rig.propose(draft_row(parent, [9, 4]))
    # the child says another token where the parent said 1
    rig.draft.copied([(4, 7)])
    child = [*parent[:-1], 50, 51]
    rig.step((child[:-1], 6, [9, 7]))
    row = draft_row(child, [9, 7])
    assert rig.propose(row) == [4]
    assert drafts_of(row, 4) == _expected(child, 0, 4)


def test_blocks_that_change_hands_hold_nothing() -> None:
    """Requests come and go, share what they begin with, copy what they write, and are swapped."""
    random = Random(5)
    rig = _Rig()
    free = list(range(BLOCKS))
    random.shuffle(free)
    live: dict[int, tuple[list[int], list[int]]] = {}
    held: dict[int, int] = {}
    seen = 0

    def take(count: int) -> list[int]:
        blocks = [free.pop() for _ in range(count)]
        rig.draft.forget(blocks, clear=True)
        for block in blocks:
            held[block] = 1
        return blocks

    def drop(blocks: Sequence[int]) -> None:
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                free.insert(random.randrange(len(free) + 1), block)

    for number in range(600):
        if len(live) < 4 and len(free) > 20:
            tokens, blocks = [random.randrange(VOCAB) for _ in range(random.randint(2, 19))], []
            if live and random.random() < 0.5:
                # the full blocks of another, which may go on otherwise
                first, theirs = random.choice(list(live.values()))
                count = (len(first) - 1) // SIZE
                blocks = theirs[:count]
                tokens = first[: count * SIZE] + tokens
                for block in blocks:
                    held[block] += 1
            shared = len(blocks) * SIZE
            blocks = blocks + take(len(tokens) // SIZE + 1 - len(blocks))
            live[number] = tokens, blocks
            # in two chunks, the second of which may not be listened to
            middle = random.randint(shared, len(tokens) - 1)
            if middle > shared:
                rig.step((tokens[:middle], shared, blocks))
            if len(tokens) - 1 > middle:
                rig.step((tokens[:-1], middle, blocks))
            if random.random() < 0.1:
                rig.draft.lose()
        name = random.choice(list(live))
        tokens, blocks = live[name]
        what = random.random()
        if what < 0.1:
            drop(live.pop(name)[1])
            continue
        if what < 0.2:
            # a fork's last block is copied; one from host memory is not
            place = len(blocks) - 1
            (fresh,) = take(1)
            if what < 0.15:
                rig.draft.copied([(blocks[place], fresh)])
            drop([blocks[place]])
            blocks[place] = fresh
        blocks += take((len(tokens) + 4) // SIZE + 1 - len(blocks)) if len(free) > 4 else []
        room = len(blocks) * SIZE - len(tokens) + 1
        if room < 1:
            drop(live.pop(name)[1])
            continue
        right: list[int] = []
        if what < 0.7:
            row = draft_row(tokens, blocks, min(4, room))
            reach = rig.draft._reach(row)
            (made,) = rig.propose(row)
            assert made == (0 if reach is None else row.count)
            if reach is not None:
                assert drafts_of(row, made) == _expected(tokens, reach.first, made)
                seen += made
                right = drafts_of(row, made)[: random.randint(0, min(made, room - 1))]
        # some of what was guessed is right, and something wrong was computed too
        before = len(tokens)
        wrong = [random.randrange(VOCAB) for _ in range(min(2, room - 1 - len(right)))]
        if room - 1 >= len(right):
            rig.step(([*tokens, *right, *wrong], before - 1, blocks))
        tokens += [*right, random.randrange(VOCAB)]
        if len(tokens) > 60 or len(tokens) > len(blocks) * SIZE:
            drop(live.pop(name)[1])
    assert seen > 500
