"""Tokens of rows with guesses are distributed as those of rows without, one by one and in pairs.

A model whose logits depend on the last token alone, over a vocabulary of 8, so that it is known how
each token and each pair is distributed. Every token is guessed once, in many requests with seeds of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.backends.runner.interface import LoadedModel
from paceline.backends.runner.model_runner import ModelRunner
from paceline.backends.runner.sampling import SampleRow, Samples
from paceline.backends.torch.step import TorchSampler
from paceline.core.outputs import Draft, NewRequest, ScheduledRow, SchedulerOutput
from paceline.core.sampling_params import SamplingParams

VOCAB: Final = 8
# of each guess
REQUESTS: Final = 2_000
BATCH: Final = 1_000
# how often a right program may fail, for each of 16 tests with seeds that do not change
CHANCE: Final = 1e-4
FIRST: Final = 3
LOGITS: Final = np.random.default_rng(11).normal(0.0, 1.2, (VOCAB, VOCAB)).astype(np.float32)


class Markov:
    """See the module."""

    likeliest = None

    def forward(self, token_ids: Any, positions: Any, batch: Any, sampled: Any, **_: Any) -> Any:
        return torch.from_numpy(LOGITS[token_ids[sampled]])

    def copy_blocks(self, pairs: Any) -> None: ...
    def swap_blocks(self, swaps: Any) -> None: ...
    def clear_blocks(self, block_ids: Any) -> None: ...


class SameUniform:
    """The bug that must be seen: what follows a right guess is drawn with the number that the guess
    was judged by."""

    def __init__(self) -> None:
        self._sampler = TorchSampler()

    def sample(self, logits: Any, rows: Sequence[SampleRow], likeliest: Any) -> Samples:
        cut = [row._replace(tokens=row.tokens[: row.num_prompt_tokens]) for row in rows]
        return self._sampler.sample(logits, cut, likeliest)


def _draws(sampler: Any, guess: int) -> NDArray[np.int64]:
    """The first two tokens of all requests, -1 for a second one that was not drawn."""
    model: Any = Markov()
    loaded = LoadedModel(model, sampler, Any, 0.0)
    found = []
    for start in range(0, REQUESTS, BATCH):
        runner = ModelRunner(
            loaded, vocab_size=VOCAB, block_size=16, max_num_seqs=BATCH, max_model_len=16
        )
        new, rows, drafts = [], [], []
        for index in range(BATCH):
            sampling = SamplingParams(
                max_tokens=8, temperature=1.0, seed=guess * REQUESTS + start + index
            )
            new.append(NewRequest(str(index), (1, FIRST), 2, sampling, (index,)))
            rows.append(ScheduledRow(str(index), 0, 3, (), True))
            drafts.append(Draft(index, (guess,), "test"))
        plan = SchedulerOutput(0, tuple(rows), tuple(new), (), (), 3 * BATCH, drafts=tuple(drafts))
        for tokens in runner.run(plan).sampled:
            assert len(tokens) == 1 + (tokens[0] == guess)
            found.append((*tokens, -1)[:2])
    return np.array(found)


def _p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Of Pearson's chi-squared test."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(counts) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def _p_values(sampler: Any, guess: int) -> tuple[float, float]:
    """That the first tokens are drawn as they should be, and those behind a right guess."""
    chances = np.exp(LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True)))
    draws = _draws(sampler, guess)
    first = np.bincount(draws[:, 0], minlength=VOCAB)
    second = np.bincount(draws[draws[:, 0] == guess, 1], minlength=VOCAB)
    return (
        _p_value(first, REQUESTS * chances[FIRST]),
        _p_value(second, first[guess] * chances[guess]),
    )


@pytest.mark.parametrize("guess", range(VOCAB))
def test_guesses_do_not_change_the_distribution(guess: int) -> None:
    assert min(_p_values(TorchSampler(), guess)) > CHANCE


def test_the_test_sees_a_draw_that_is_used_twice() -> None:
    first, second = _p_values(SameUniform(), 2)
    assert first > CHANCE > second
