"""The draft model's cache keeps up with the served one's blocks, whoever holds them.

The model here is that of the null backend: a token's value goes into its slot, and the next token
is the sum of all slots before it. So a slot that holds something else shows as a wrong guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.drafting import draft_model
from paceline.backends.drafting.draft_model import DraftModel
from paceline.backends.reference.null import expected_tokens
from paceline.backends.runner.drafting import DraftRow, Made
from paceline.backends.runner.interface import AttentionBatch, LoadedModel
from paceline.backends.runner.sampling import PreparedSampling, SampleRow, Samples
from paceline.core.outputs import BlockSwap
from paceline.core.sampling_params import SamplingParams
from tests.backends.draft_rows import BLOCKS, SIZE, VOCAB, Likeliest, draft_row, drafts_of


class _Sums:
    """A ``StepModel`` of integers; what nobody wrote is nonsense."""

    def __init__(self) -> None:
        self.cache = np.full((BLOCKS, SIZE), 7_000_003)
        self.likeliest: NDArray[np.int32] | None = None
        # tokens of each call
        self.calls: list[int] = []

    def write(self, table: NDArray[Any], tokens: Sequence[int], start: int) -> None:
        for position, token in enumerate(tokens, start):
            self.cache[table[position // SIZE], position % SIZE] = token * (position + 1)

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        sampled: NDArray[np.int64],
        *,
        needs_logits: bool = True,
    ) -> NDArray[np.float32]:
        self.calls.append(len(token_ids))
        found, at = [], 0
        for start, count, table in zip(batch.starts, batch.counts, batch.block_tables, strict=True):
            assert positions[at : at + count].tolist() == list(range(start, start + count))
            self.write(table, token_ids[at : at + count].tolist(), int(start))
            at += int(count)
            if at - 1 in sampled:
                slots = [self.cache[table[p // SIZE], p % SIZE] for p in range(start + count)]
                found.append(int(sum(slots)) % VOCAB)
        assert len(found) == len(sampled)
        self.likeliest = np.array(found, dtype=np.int32)
        return np.empty((0, VOCAB), dtype=np.float32)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("its blocks are computed, not copied")

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        raise AssertionError("its blocks are computed, not swapped")

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self.cache[list(block_ids)] = 7_000_003


def _made(model: _Sums, *, served: _Sums | None = None) -> DraftModel:
    def mirror(block_ids: NDArray[np.int64]) -> None:
        assert served is not None
        model.cache[block_ids] = served.cache[block_ids]

    return _loaded(model, mirror=None if served is None else mirror)


def _loaded(
    model: _Sums, sampler: Likeliest | None = None, own: int = VOCAB, **settings: Any
) -> DraftModel:
    return DraftModel(
        LoadedModel(model, sampler or Likeliest(), lambda *_: [], 0.0),
        vocab_size=own,
        served_vocab_size=VOCAB,
        num_blocks=BLOCKS,
        block_size=SIZE,
        **settings,
    )


def test_guesses_are_what_the_model_says() -> None:
    model = _Sums()
    draft = _made(model)
    rows = [
        draft_row([3, 5, 8], [9, 4, 1]),
        draft_row([1] * 9, [20, 7, 30, 31], 2),
        draft_row([6], [50, 51], 1),
    ]
    assert draft.propose(rows) == [4, 2, 1]
    for row, tokens in zip(rows, ([3, 5, 8], [1] * 9, [6]), strict=True):
        assert drafts_of(row, row.count) == expected_tokens(tokens, row.count, VOCAB)
    # all that was lacking in one pass with the last tokens, then a token for each that goes on
    assert model.calls == [3 + 9 + 1, 2, 1, 1]


def test_known_tokens_are_computed_once() -> None:
    model = _Sums()
    draft = _made(model)
    tokens = [3, 5, 8, 13, 2]
    blocks = list(range(10, 40))
    draft.propose([draft_row(tokens, blocks)])
    model.calls.clear()
    # two guesses were right, and the last two are written over
    tokens += [*expected_tokens(tokens, 2, VOCAB), 96]
    row = draft_row(tokens, blocks)
    assert draft.propose([row]) == [4]
    assert drafts_of(row, 4) == expected_tokens(tokens, 4, VOCAB)
    assert model.calls == [3, 1, 1, 1]


@pytest.mark.parametrize("mirrored", [False, True])
def test_blocks_that_change_hands_hold_nothing(mirrored: bool) -> None:
    """Requests come and go, share what they begin with, copy what they write, and are swapped."""
    random = Random(5)
    served, model = _Sums(), _Sums()
    draft = _made(model, served=served if mirrored else None)
    free = list(range(BLOCKS))
    random.shuffle(free)
    live: dict[int, tuple[list[int], list[int]]] = {}
    held: dict[int, int] = {}

    def take(count: int) -> list[int]:
        blocks = [free.pop() for _ in range(count)]
        draft.forget(blocks, clear=True)
        for block in blocks:
            held[block] = 1
        return blocks

    def drop(blocks: Sequence[int]) -> None:
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                free.insert(random.randrange(len(free) + 1), block)

    for number in range(400):
        if len(live) < 4 and len(free) > 20:
            tokens, blocks = [random.randrange(VOCAB) for _ in range(random.randint(1, 19))], []
            if live and random.random() < 0.5:
                # the full blocks of another, but for the last token
                first, theirs = random.choice(list(live.values()))
                blocks = theirs[: (len(first) - 1) // SIZE]
                tokens = first[: len(blocks) * SIZE] + tokens
                for block in blocks:
                    held[block] += 1
            blocks = blocks + take(len(tokens) // SIZE + 1 - len(blocks))
            live[number] = tokens, blocks
            served.write(np.array(blocks), tokens[:-1], 0)
        name = random.choice(list(live))
        tokens, blocks = live[name]
        what = random.random()
        if what < 0.1:
            drop(live.pop(name)[1])
            continue
        if what < 0.2:
            # written by a copy, as of a fork's last block or from host memory
            place = len(blocks) - 1
            (fresh,) = take(1)
            draft.forget([fresh])
            served.cache[fresh] = served.cache[blocks[place]]
            drop([blocks[place]])
            blocks[place] = fresh
        blocks += take((len(tokens) + 4) // SIZE + 1 - len(blocks)) if len(free) > 4 else []
        room = len(blocks) * SIZE - len(tokens) + 1
        if room < 1:
            drop(live.pop(name)[1])
            continue
        if what < 0.7:
            row = draft_row(tokens, blocks, min(4, room))
            (made,) = draft.propose([row])
            assert drafts_of(row, made) == expected_tokens(tokens, made, VOCAB)
            assert made == row.count
        # what was guessed is verified, and some of it is wrong
        right = random.randint(0, min(3, room - 1))
        before = len(tokens)
        tokens += [*expected_tokens(tokens, right, VOCAB), random.randrange(VOCAB)]
        served.write(np.array(blocks), tokens[before - 1 : -1], before - 1)
        if len(tokens) > 60:
            drop(live.pop(name)[1])


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_long_prompt_is_made_up_for_bit_by_bit(
    mirrored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "_COMPUTED", 50)
    monkeypatch.setattr(draft_model, "_COPIED", 50)
    served, model = _Sums(), _Sums()
    draft = _made(model, served=served if mirrored else None)
    tokens = [(i * 37) % VOCAB for i in range(180)]
    blocks = list(range(48))
    served.write(np.array(blocks), tokens[:-1], 0)
    made = []
    for _ in range(6):
        row, short = draft_row(tokens, blocks), draft_row([5, 6], [60, 61], 2)
        served.write(np.array([60, 61]), [5], 0)
        made.append(draft.propose([row, short]))
        if made[-1][0]:
            assert drafts_of(row, 4) == expected_tokens(tokens, 4, VOCAB)
    # the other waits for its turn, and then has it
    assert [first for first, _ in made] == [0, 0, 0, 4, 4, 4]
    assert made[-1] == [4, 2]
    assert max(model.calls) <= 52


def test_a_model_that_says_nothing_sensible_guesses_nothing() -> None:
    class Broken(Likeliest):
        def sample(self, logits: Any, rows: Sequence[SampleRow], likeliest: Any) -> Samples:
            finite = [row.tokens[-1] != 13 for row in rows]
            return Samples(likeliest.tolist(), finite, [None] * len(rows))

    draft = _loaded(_Sums(), Broken())
    assert draft.propose([draft_row([3, 5, 13], [1, 2]), draft_row([4], [3, 4], 3)]) == [0, 3]


@pytest.mark.parametrize("mirrored", [False, True])
def test_what_was_made_up_for_is_told(mirrored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_COMPUTED", 50)
    monkeypatch.setattr(draft_model, "_COPIED", 50)
    draft = _made(_Sums(), served=_Sums() if mirrored else None)
    tokens = [(i * 37) % VOCAB for i in range(121)]
    told = []
    for _ in range(4):
        draft.propose([draft_row(tokens, list(range(40))), draft_row([5, 6, 7], [60, 61], 1)])
        told.append((draft.caught_up, draft.behind))
    # the last token is no news, and a row that waits for its turn has none
    assert told[:3] == [([50, 0], [70, 2]), ([50, 0], [20, 2]), ([20, 2], [0, 0])]
    assert sum(told[3][0]) <= 1


def test_tokens_of_a_padded_head_are_no_guesses() -> None:
    class Padded(Likeliest):
        def sample(self, logits: Any, rows: Sequence[SampleRow], likeliest: Any) -> Samples:
            likely = [VOCAB + 1 if len(row.tokens) == 5 else 7 for row in rows]
            return Samples(likely, [True] * len(rows), [None] * len(rows))

    # the third one is beyond what the served model has
    draft = _loaded(_Sums(), Padded(), VOCAB + 3)
    row = draft_row([3, 5, 8], [9, 4, 1])
    assert draft.propose([row]) == [2]
    assert drafts_of(row, 2) == [7, 7]


def test_a_request_with_a_token_that_the_model_lacks_is_not_guessed() -> None:
    model = _Sums()
    draft = _loaded(model, own=90)
    rows = [draft_row([3, 95, 8], [9, 4, 1]), draft_row([3, 89], [20, 7], 2)]
    assert draft.propose(rows) == [0, 2]
    assert draft.propose([draft_row([3, 5, 8, 90], [30, 31, 32])]) == [0]


def test_settings_to_guess_with_choose_tokens_and_tell_nothing() -> None:
    draft = _loaded(_Sums(), own=90)
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=2)
    assert PreparedSampling(asked, VOCAB).reads_logits
    plain = draft.prepare(asked)
    # the likeliest token is enough, and no row of logits is looked at
    assert not plain.reads_logits
    assert (plain.params.logprobs, plain.params.prompt_logprobs) == (None, None)
    named = SamplingParams(
        max_tokens=1,
        logit_bias=((95, 3.0), (5, 1.0)),
        bad_words=((3, 95), (4,)),
        logprob_token_ids=(96,),
        repetition_penalty=1.5,
    )
    prepared = draft.prepare(named)
    assert prepared.bias_ids == [5]
    assert prepared.params.bad_words == ((4,),)
    assert prepared.params.repetition_penalty == 1.5


class _Faulty(_Sums):
    """Fails over a token."""

    def forward(self, token_ids: NDArray[np.int64], *args: Any, **settings: Any) -> Any:
        if 77 in token_ids:
            raise RuntimeError("unlucky")
        return super().forward(token_ids, *args, **settings)


def _named(name: str, tokens: Sequence[int], first: int, count: int = 2) -> DraftRow:
    return replace(draft_row(tokens, [first, first + 1], count), request_id=name)


def test_a_fault_costs_the_drafts_of_one_request(caplog: pytest.LogCaptureFixture) -> None:
    draft = _loaded(_Faulty())
    rows = [_named("a", [3, 5], 0), _named("b", [3, 77], 2), _named("c", [1], 4)]
    assert draft.make(rows) == [Made(2, 1), Made(failed=True), Made(2, 0)]
    for row in rows[::2]:
        known = row.tokens[: row.last + 1].tolist()
        assert drafts_of(row, 2) == expected_tokens(known, 2, VOCAB)
    assert "request=b is not drafted any more: RuntimeError('unlucky')" in caplog.text
    assert "request=a" not in caplog.text
    # one that does what it should is a reason to go on
    for number in range(6):
        assert draft.make([_named("d", [77], 6)])[0].failed
        assert draft.make([_named("e", [1, 1], 8)])[0].num_drafted == 2, number


def test_rows_that_fail_together_are_guessed_one_by_one() -> None:
    class Alone(_Sums):
        def forward(self, token_ids: NDArray[np.int64], *args: Any, **settings: Any) -> Any:
            self.calls.append(len(token_ids))
            if len(token_ids) > 2:
                raise RuntimeError("too many")
            return super().forward(token_ids, *args, **settings)

    model = Alone()
    draft = _loaded(model)
    for number in range(5):
        rows = [_named("a", [3], 0, 1), _named("b", [4], 2, 1), _named("c", [1], 4, 1)]
        model.calls.clear()
        assert [made.num_drafted for made in draft.make(rows)] == [1, 1, 1]
        # from the third time on it is not tried together
        assert (3 in model.calls) == (number < 3)
        draft.forget([0, 2, 4])


def test_a_model_that_only_fails_is_not_asked_any_more(caplog: pytest.LogCaptureFixture) -> None:
    model = _Faulty()
    draft = _loaded(model)
    for name in "abc":
        assert draft.make([_named(name, [77], 0)]) == [Made(failed=True)]
    assert "draft_model_off faults=3" in caplog.text
    model.calls.clear()
    assert draft.make([_named("d", [3, 5], 2), _named("e", [4], 4)]) == [Made(), Made()]
    assert model.calls == []
