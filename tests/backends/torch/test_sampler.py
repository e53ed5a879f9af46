"""The batched sampler, field by field, against the same rules written for one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from paceline.backends.runner.sampling import PreparedSampling, SampleRow, uniforms
from paceline.backends.torch import sampler
from paceline.backends.torch.sampler import sample, token_logprobs
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError

VOCAB = 300


def make_row(
    tokens: Sequence[int] = (1, 2, 3), prompt: int = 3, vocab: int = VOCAB, **params: Any
) -> SampleRow:
    settings = SamplingParams(**({"max_tokens": 1000, "temperature": 0.0} | params))
    prepared = PreparedSampling(settings, vocab)
    return SampleRow(prepared, np.array(tokens, dtype=np.int32), prompt)


def make_logits(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def expected_weights(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Unnormalised probabilities left after temperature, min_p, top_k and top_p, in float64."""
    scaled = logits.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    if params.top_p < 1.0:
        share, total = 0.0, weights.sum()
        for token in order:
            if share >= params.top_p * total:
                weights[token] = 0.0
            share += weights[token]
    return weights


def expected_token(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The inverse cumulative distribution at the row's uniform: in the vocabulary's order without
    filters, likeliest first with them."""
    weights = expected_weights(logits, params)
    order = np.arange(len(weights))
    if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        order = np.argsort(-weights, kind="stable")
    (uniform,) = uniforms(
        np.array([params.seed], dtype=np.int64).astype(np.uint64),
        np.array([position], dtype=np.uint64),
    )
    ends = np.cumsum(weights[order])
    return int(order[np.searchsorted(ends, uniform * ends[-1], side="right")])


class TestUniforms:
    def test_is_splitmix64_as_documented(self) -> None:
        mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

        def mix(z: int) -> int:
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
            return z ^ z >> 31

        for seed in (0, 1, 12345, -1, -(2**63), 2**63 - 1):
            for position in (0, 1, 77, 100_000):
                state = mix(seed + golden & mask) + (position + 1) * golden & mask
                (got,) = uniforms(
                    np.array([seed], dtype=np.int64).astype(np.uint64),
                    np.array([position], dtype=np.uint64),
                )
                assert got == (mix(state) >> 11) / 2**53

    def test_spread_evenly_over_positions_and_over_seeds(self) -> None:
        count = 20_000
        index = np.arange(count, dtype=np.uint64)
        fixed = np.full(count, 7, dtype=np.uint64)
        for values in (uniforms(fixed, index), uniforms(index, fixed)):
            assert values.min() >= 0.0
            assert values.max() < 1.0
            histogram, _ = np.histogram(values, bins=20, range=(0, 1))
            # chi-square with 19 degrees of freedom: 43.8 is the 0.1 % point
            assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 43.8
            assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


class TestGreedy:
    @pytest.mark.parametrize("vocab", [5, 255, 256, 257, 512, 1000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_first_of_the_largest(self, vocab: int, dtype: torch.dtype) -> None:
        # few values, so most rows have ties
        logits = torch.randint(-4, 4, (64, vocab)).to(dtype)
        rows = [make_row(vocab=vocab)] * 64
        expected = [row.tolist().index(max(row.tolist())) for row in logits]
        assert sample(logits, rows).token_ids == expected

    def test_a_model_that_looked_is_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> NoReturn:
            raise AssertionError("looked for again")

        logits = make_logits(4)
        known = logits.argmax(-1).numpy().astype(np.int32)
        known[2] = -1
        rows = [make_row(), make_row(temperature=1.0), make_row(), make_row()]
        drawn = sample(logits, rows).token_ids
        monkeypatch.setattr(torch, "isfinite", fail)
        samples = sample(logits, rows, known)
        assert samples.finite == [True, True, False, True]
        assert samples.token_ids[0] == known[0] and samples.token_ids[3] == known[3]
        assert samples.token_ids[1] == drawn[1]

    def test_does_nothing_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> NoReturn:
            raise AssertionError("called for a greedy batch")

        monkeypatch.setattr(sampler, "_sample_special", fail)
        logits = make_logits(4)
        assert sample(logits, [make_row()] * 4).token_ids == logits.argmax(-1).tolist()
        with pytest.raises(AssertionError, match="called"):
            sample(logits, [make_row()] * 3 + [make_row(temperature=1.0)])


class TestDraw:
    SETTINGS: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 64, "temperature": 3.0},
        {"top_k": 65, "temperature": 3.0},
        {"top_k": 1024, "temperature": 9.0},
        {"top_k": 1025, "temperature": 9.0},
        {"top_k": 2000, "temperature": 9.0, "top_p": 0.99},
        {"top_k": 100_000},
        {"top_p": 0.2},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 9.0},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1e-9, "temperature": 9.0},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
        {"top_k": 1500, "top_p": 0.5, "min_p": 1e-5, "temperature": 6.0},
        {"top_p": 0.97, "min_p": 0.001, "temperature": 7.0},
    )

    @pytest.mark.parametrize("vocab", [40, 300, 3000])
    def test_every_row_as_if_alone(self, vocab: int) -> None:
        """All settings in one batch, with many seeds and positions each: exactly the tokens of the
        rules applied row by row."""
        rows = [
            make_row(
                range(3 + position),
                vocab=vocab,
                **({"temperature": 1.0, "seed": seed} | settings),
            )
            for settings in self.SETTINGS
            for seed, position in ((1, 0), (2, 0), (-3, 5), (2**62, 17), (5, 1), (6, 30))
        ]
        logits = make_logits(len(rows), vocab)
        got = sample(logits, rows).token_ids
        for index, row in enumerate(rows):
            wanted = expected_token(logits[index], row.sampling.params, row.num_output_tokens)
            assert got[index] == wanted, row.sampling.params
            alone = sample(logits[index : index + 1], [row]).token_ids
            assert alone == [got[index]]

    @pytest.mark.parametrize(
        "settings",
        [
            {"temperature": 0.7},
            {"temperature": 2.0},
            {"top_k": 5, "temperature": 2.0},
            {"top_p": 0.6, "temperature": 2.0},
            {"min_p": 0.1, "temperature": 2.0},
        ],
        ids=str,
    )
    def test_frequencies(self, settings: dict[str, Any]) -> None:
        count = 6000
        logits = make_logits(1, 30, scale=1.5)
        params: dict[str, Any] = {"temperature": 1.0, "seed": 9} | settings
        tokens = np.arange(count + 3, dtype=np.int32)
        prepared = PreparedSampling(SamplingParams(max_tokens=9, **params), 30)
        rows = [SampleRow(prepared, tokens[: 3 + position], 3) for position in range(count)]
        seen = Counter(sample(logits.expand(count, -1), rows).token_ids)
        weights = expected_weights(logits[0], prepared.params)
        for token, probability in enumerate(weights / weights.sum()):
            spread = math.sqrt(probability * (1 - probability) / count)
            assert abs(seen[token] / count - probability) <= 4 * spread, token
            assert probability > 0 or seen[token] == 0

    def test_candidates_that_do_not_decide_are_widened(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked_at: list[int] = []
        original = sampler._draw_filtered

        def spy(*args: Any) -> Any:
            looked_at.append(args[3])
            return original(*args)

        monkeypatch.setattr(sampler, "_draw_filtered", spy)
        flat = torch.linspace(0.0, 0.1, 3000).unsqueeze(0)
        row = make_row(vocab=3000, temperature=1.0, top_p=0.9)
        assert sample(flat, [row]).token_ids == [expected_token(flat[0], row.sampling.params, 0)]
        assert looked_at == [1024, 3000]
        looked_at.clear()
        sample(make_logits(1, 3000), [row])
        assert looked_at == [1024]
        looked_at.clear()
        sample(flat, [make_row(vocab=3000, temperature=1.0, top_k=3, top_p=0.9)])
        assert looked_at == [64]
        looked_at.clear()
        sample(flat, [make_row(vocab=3000, temperature=1.0)])
        assert looked_at == []

    def test_extreme_temperatures_and_logits(self) -> None:
        logits = make_logits(3, scale=1.0)
        logits[1] *= 1e30
        rows = [
            make_row(temperature=1e-300, seed=1),
            make_row(temperature=100.0, seed=2),
            make_row(temperature=1e-6, top_p=0.5, seed=3),
        ]
        result = sample(logits, rows)
        assert result.token_ids == logits.argmax(-1).tolist()
        assert result.finite == [True] * 3

    def test_rounding_never_leads_to_a_token_without_weight(self) -> None:
        weights = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
        just_below, one = torch.tensor([0.99]).double(), torch.tensor([1.0]).double()
        assert sampler._invert(weights, just_below, torch.tensor([0])).tolist() == [1]
        # no uniform is 1, but a sum can round to as much
        assert sampler._invert(weights, one, torch.tensor([0])).tolist() == [0]

    def test_more_rows_than_are_drawn_at_once(self) -> None:
        logits = make_logits(150)
        rows = [make_row(temperature=1.0, seed=seed) for seed in range(150)]
        got = sample(logits, rows).token_ids
        assert got == [expected_token(logits[i], rows[i].sampling.params, 0) for i in range(150)]


class TestReshape:
    def reshaped(self, logits: torch.Tensor, *rows: SampleRow) -> torch.Tensor:
        work = logits.clone()
        sampler._reshape(work, rows)
        return work

    def test_penalties(self) -> None:
        logits = make_logits(5)
        logits[:, 4], logits[:, 5] = 2.0, -2.0
        tokens = [4, 5, 6, 7, 7, 7, 8, 4]
        rows = [
            make_row(tokens, 3, repetition_penalty=1.5),
            make_row(tokens, 3, presence_penalty=0.7),
            make_row(tokens, 3, frequency_penalty=-0.4),
            make_row(
                tokens, 3, repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.25
            ),
            make_row(tokens, 3),
        ]
        expected = logits.double()
        for i, row in enumerate(rows):
            params, output = row.sampling.params, Counter(tokens[3:])
            for token in range(VOCAB):
                value = float(expected[i, token])
                if token in tokens:
                    penalty = params.repetition_penalty
                    value = value / penalty if value > 0 else value * penalty
                value -= params.frequency_penalty * output[token]
                value -= params.presence_penalty * (output[token] > 0)
                expected[i, token] = value
        torch.testing.assert_close(self.reshaped(logits, *rows).double(), expected)

    def test_penalties_change_greedy_choices(self) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 9], logits[0, 8] = 2.0, 1.5
        assert sample(logits, [make_row([9, 9], 0)]).token_ids == [9]
        assert sample(logits, [make_row([9, 9], 0, presence_penalty=0.6)]).token_ids == [8]
        assert sample(logits, [make_row([9, 9], 2, presence_penalty=0.6)]).token_ids == [9]
        assert sample(logits, [make_row([9, 9], 0, frequency_penalty=0.3)]).token_ids == [8]
        assert sample(logits, [make_row([9], 0, frequency_penalty=0.3)]).token_ids == [9]
        assert sample(logits, [make_row([9, 9], 2, repetition_penalty=1.5)]).token_ids == [8]

    def test_a_tiny_repetition_penalty_stays_finite(self) -> None:
        logits = (make_logits(1).abs() + 1.0).expand(40, -1)
        settings: dict[str, Any] = {"repetition_penalty": 1e-300, "temperature": 1.0}
        rows = [make_row([3, 4], 2, seed=seed, **settings) for seed in range(40)]
        # both reach the largest number there is, and share the probability
        assert set(sample(logits, rows).token_ids) == {3, 4}

    def test_bias_adds_up_and_changes_the_choice(self) -> None:
        logits = make_logits(1)
        row = make_row(logit_bias=((7, 100.0), (7, 1.0), (8, -100.0)))
        got = self.reshaped(logits, row)
        assert got[0, 7] == pytest.approx(float(logits[0, 7]) + 101.0)
        assert got[0, 8] == pytest.approx(float(logits[0, 8]) - 100.0)
        assert sample(logits, [row]).token_ids == [7]
        sampled = make_row(logit_bias=((7, 100.0),), temperature=1.0)
        assert sample(logits, [sampled]).token_ids == [7]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_min_tokens_forbids_ending(self, temperature: float) -> None:
        logits = make_logits(1)
        logits[0, 5], logits[0, 6] = 200.0, 100.0
        settings: dict[str, Any] = {
            "min_tokens": 2,
            "temperature": temperature,
            "eos_token_ids": frozenset({5}),
            # ids that the vocabulary does not have can be asked for and never come
            "stop_token_ids": frozenset({6, VOCAB, 10**9}),
            # the ban holds against bias
            "logit_bias": ((5, 1000.0),),
        }
        for outputs in (0, 1):
            row = make_row([1, 2, 3, *[9] * outputs], 3, **settings)
            assert sample(logits, [row]).token_ids[0] not in (5, 6)
        row = make_row([1, 2, 3, 9, 9], 3, **settings)
        assert sample(logits, [row]).token_ids == [5]

    def test_bias_outside_the_vocabulary_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"token 300, the vocabulary has 300"):
            make_row(logit_bias=((VOCAB, 1.0),))


class TestLogprobs:
    def test_of_the_raw_logits(self) -> None:
        logits = make_logits(4)
        rows = [
            make_row(logprobs=3),
            make_row(logprobs=0, temperature=2.0, seed=4, logit_bias=((11, 5.0),)),
            make_row(),
            make_row(logprobs=20, temperature=0.01, top_k=3, repetition_penalty=1.3),
        ]
        before = logits.clone()
        result = sample(logits, rows)
        assert torch.equal(logits, before)
        reference = logits.double().log_softmax(-1)
        for index, count in ((0, 3), (1, 0), (3, 20)):
            entry = result.logprobs[index]
            assert entry is not None
            assert entry.token_id == result.token_ids[index]
            own = float(reference[index, entry.token_id])
            assert entry.logprob == pytest.approx(own, abs=1e-5)
            assert entry.rank == 1 + int((reference[index] > own).sum())
            best = reference[index].topk(count)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )
        assert result.logprobs[2] is None

    def test_of_any_number_and_of_named_tokens(self) -> None:
        logits = make_logits(4)
        rows = [
            make_row(logprobs=21),
            make_row(logprobs=2, logprob_token_ids=(7, 3, 250), temperature=1.0),
            make_row(logprobs=2),
            make_row(logprobs=VOCAB),
        ]
        result = sample(logits, rows)
        reference = logits.double().log_softmax(-1)
        for index, wanted in ((0, 21), (1, 3), (2, 2), (3, VOCAB)):
            entry = result.logprobs[index]
            assert entry is not None and len(entry.top) == wanted
            own = float(reference[index, entry.token_id])
            assert entry.logprob == pytest.approx(own, abs=1e-5)
            assert entry.rank == 1 + int((reference[index] > own).sum())
            for token, value in entry.top:
                assert value == pytest.approx(float(reference[index, token]), abs=1e-5)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
        named = result.logprobs[1]
        assert named is not None and {token for token, _ in named.top} == {3, 7, 250}
        with pytest.raises(InvalidRequestError, match=r"token 300, the vocabulary has 300"):
            make_row(logprobs=1, logprob_token_ids=(VOCAB,))

    def test_more_than_the_vocabulary(self) -> None:
        result = sample(make_logits(1, 7), [make_row(vocab=7, logprobs=20)])
        assert result.logprobs[0] is not None
        assert len(result.logprobs[0].top) == 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_told_apart_and_harm_nobody(value: float) -> None:
    rows = [make_row(temperature=float(i % 2), seed=i, logprobs=2, top_p=0.9) for i in range(6)]
    logits = make_logits(6)
    good = sample(logits, rows)
    assert good.finite == [True] * 6
    logits[2, 17] = logits[3, 299] = value
    result = sample(logits, rows)
    assert result.finite == [True, True, False, False, True, True]
    for index in (0, 1, 4, 5):
        assert result.token_ids[index] == good.token_ids[index]
        assert result.logprobs[index] == good.logprobs[index]
    assert result.logprobs[2] is None


def test_scores_do_not_depend_on_the_company() -> None:
    """Nor on how many are taken at once: 64 of 70 rows, and equal logits in each."""
    logits = make_logits(70).round()
    token_ids = list(range(70))
    counts = [index % 21 for index in token_ids]
    together = token_logprobs(logits, token_ids, counts)
    alone = [token_logprobs(logits[[i]], [i], [counts[i]])[0] for i in token_ids]
    assert [(e.token_id, e.rank, e.top) for e in together] == [
        (e.token_id, e.rank, e.top) for e in alone
    ]
    assert [len(entry.top) for entry in together] == counts
    assert token_logprobs(logits[:0], [], []) == []
