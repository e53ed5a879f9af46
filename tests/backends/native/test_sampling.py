"""The native sampler: every kernel variant, any number of threads, boundaries and distributions.

``tests/contract/test_samplers.py`` holds it to the torch sampler's results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, sampling, unavailable_reason
from paceline.backends.native.sampling import NativeSampler, token_logprobs
from paceline.backends.runner.sampling import PreparedSampling, SampleRow
from paceline.core.sampling_params import SamplingParams
from paceline.errors import ConfigError
from tests.backends.native.reference import levels, random_weights, rope_tables, tiny_config
from tests.backends.sampling_reference import (
    allowed_tokens,
    likeliest_of,
    make_row,
    reshaped,
    uniform_of,
    weights_of,
)

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.2},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300, "temperature": 5.0},
    {"top_k": 2000, "top_p": 0.7, "temperature": 5.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    # far more tokens than are looked at first
    {"top_p": 0.95, "temperature": 20.0},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"min_p": 1e-4, "temperature": 20.0},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 3000, "top_p": 0.6, "min_p": 1e-5, "temperature": 9.0},
)


@contextmanager
def sampler_of(isa: str | None = None, threads: int = 2) -> Iterator[NativeSampler]:
    config = tiny_config(num_hidden_layers=1)
    model = NativeModel(
        config,
        random_weights(config, 0).items(),
        rope_tables(config, 16),
        NativeSettings(dtype="float32", num_blocks=1, threads=threads, isa=isa),
    )
    yield NativeSampler(model)
    model.close()


def make_logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def make_rows(vocab: int, each: int) -> list[SampleRow]:
    return [
        make_row(range(3 + i), vocab=vocab, **({"temperature": 1.0, "seed": i} | settings))
        for settings in SETTINGS
        for i in range(each)
    ]


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("vocab", [100, 5000, 50_257])
def test_every_variant_draws_by_the_rules(isa: str, vocab: int) -> None:
    rows = make_rows(vocab, 3)
    logits = make_logits(len(rows), vocab)
    # a third of the rows has ties, another third tokens that cannot be chosen
    logits[::3] = np.round(logits[::3])
    logits[1::3, ::2] = -np.inf
    with sampler_of(isa) as sampler:
        # what is not known is looked for, minus infinities and all
        known = np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1)
        draws = sampler._draw(logits, rows, range(len(rows)), known.astype(np.int32))
    for index, row in enumerate(rows):
        allowed = allowed_tokens(logits[index], row.sampling.params, uniform_of(row), stable=True)
        assert draws[index] in allowed, row.sampling.params


def test_a_row_depends_on_nothing_else() -> None:
    """Alone, among 64 in any order, on any number of threads, with the model's team or without."""
    vocab = 6000
    rows = make_rows(vocab, 4)
    assert len(rows) == 64
    logits = make_logits(64, vocab)
    likeliest = likeliest_of(logits)
    with sampler_of(threads=1) as sampler:
        expected = sampler.sample(logits, rows, likeliest).token_ids
        for index, row in enumerate(rows):
            one = slice(index, index + 1)
            alone = sampler.sample(logits[one], [row], likeliest[one])
            assert alone.token_ids == expected[one]
    assert NativeSampler().sample(logits, rows, likeliest).token_ids == expected
    order = np.random.default_rng(1).permutation(64)
    for threads in (2, 3, 5):
        with sampler_of(threads=threads) as sampler:
            shuffled = [rows[i] for i in order]
            mixed = sampler.sample(logits[order], shuffled, likeliest[order])
            assert mixed.token_ids == [expected[i] for i in order]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 12, "temperature": 2.0},
        {"top_p": 0.8, "temperature": 2.0},
        {"min_p": 0.1, "temperature": 2.0},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [30, 5000])
def test_frequencies(settings: dict[str, Any], vocab: int) -> None:
    """Chi-square over 20,000 draws of one seed's successive positions."""
    count, bins = 20_000, 30
    logits = np.full((1, vocab), -40.0, dtype=np.float32)
    # the tokens that matter are scattered over the vocabulary
    places = np.random.default_rng(2).permutation(vocab)[:bins]
    logits[0, places] = make_logits(1, bins, 1.5)[0]
    prepared = PreparedSampling(SamplingParams(**({"max_tokens": 9, "seed": 11} | settings)), vocab)
    tokens = np.arange(count + 3, dtype=np.int32)
    rows = [SampleRow(prepared, tokens[: 3 + position], 3) for position in range(count)]
    sampler = NativeSampler()
    drawn: list[int] = []
    for begin in range(0, count, 1000):
        part = rows[begin : begin + 1000]
        many = np.broadcast_to(logits, (len(part), vocab))
        drawn += sampler.sample(many, part, likeliest_of(logits).repeat(len(part))).token_ids
    seen = np.bincount(drawn, minlength=vocab)
    weights = weights_of(logits[0], prepared.params)
    weights[weights < prepared.params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if prepared.params.top_k:
        weights[order[prepared.params.top_k :]] = 0
    before = weights[order].cumsum() - weights[order]
    weights[order[before >= prepared.params.top_p * weights.sum()]] = 0
    expected = weights / weights.sum() * count
    assert (seen[expected == 0] == 0).all()
    # what is hardly ever drawn counts together
    common = expected >= 10
    pairs = [*zip(seen[common], expected[common], strict=True)]
    if expected[~common].sum() >= 10:
        pairs.append((seen[~common].sum(), expected[~common].sum()))
    free = len(pairs) - 1
    assert free >= 3
    chi_square = sum((s - e) ** 2 / e for s, e in pairs)
    # the 0.1 % point, by Wilson and Hilferty's approximation
    assert chi_square < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3


class TestBoundaries:
    @pytest.mark.parametrize("vocab", [64, 5000])
    def test_equal_logits_come_in_the_order_of_the_vocabulary(self, vocab: int) -> None:
        logits = np.full((64, vocab), 1.25, dtype=np.float32)
        likeliest = likeliest_of(logits)
        for settings, kept in (({"top_k": 5}, 5), ({"top_p": 0.5}, vocab // 2)):
            rows = [
                make_row(vocab=vocab, temperature=1.0, seed=seed, **settings) for seed in range(64)
            ]
            token_ids = NativeSampler().sample(logits, rows, likeliest).token_ids
            assert token_ids == [int(uniform_of(row) * kept) for row in rows]

    @pytest.mark.parametrize("vocab", [70, 5000])
    def test_the_ends_of_the_distribution(
        self, vocab: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The smallest and the largest uniform number find the first and the last kept token, never
        one beyond."""
        logits = make_logits(1, vocab)
        logits[0, 0] = logits[0, -1] = -np.inf
        order = np.argsort(-logits[0], kind="stable")
        weights = np.exp(logits[0].astype(np.float64) - logits.max())[order]
        share = weights.cumsum() / weights.sum()
        for settings, last in (
            ({"top_k": 7}, 6),
            ({"top_p": 0.6}, int(np.searchsorted(share, 0.6))),
            ({"min_p": 0.03}, int((weights >= 0.03).sum()) - 1),
        ):
            row = make_row(vocab=vocab, temperature=1.0, **settings)
            for uniform, place in ((0.0, 0), (1 - 2.0**-53, last)):
                numbers = np.array([uniform])
                monkeypatch.setattr(sampling, "uniforms", lambda *_, n=numbers: n)
                known = np.array([-1], dtype=np.int32)
                assert NativeSampler()._draw(logits, [row], [0], known) == [order[place]]
        row = make_row(vocab=vocab, temperature=1.0)
        for uniform, place in ((0.0, 1), (1 - 2.0**-53, vocab - 2)):
            numbers = np.array([uniform])
            monkeypatch.setattr(sampling, "uniforms", lambda *_, n=numbers: n)
            known = np.array([-1], dtype=np.int32)
            assert NativeSampler()._draw(logits, [row], [0], known) == [place]

    def test_extreme_temperatures_and_logits(self) -> None:
        logits = make_logits(4, 300)
        logits[1] *= 1e30
        logits[3] = [-3.4e38, 3.4e38] * 150
        rows = [
            make_row(vocab=300, temperature=1e-300, seed=1),
            make_row(vocab=300, temperature=100.0, seed=2),
            make_row(vocab=300, temperature=1e-6, top_p=0.5, seed=3),
            make_row(vocab=300, temperature=100.0, seed=4),
        ]
        token_ids = NativeSampler().sample(logits, rows, likeliest_of(logits)).token_ids
        assert token_ids[:3] == logits[:3].argmax(-1).tolist()
        assert token_ids[3] == 1 + 2 * int(uniform_of(rows[3]) * 150)

    def test_equally_likely_tokens_share_the_coldest_draws(self) -> None:
        logits = np.zeros((40, 50), dtype=np.float32)
        logits[:, [9, 30]] = 1
        rows = [make_row(vocab=50, temperature=1e-300, seed=seed) for seed in range(40)]
        token_ids = NativeSampler().sample(logits, rows, likeliest_of(logits)).token_ids
        assert set(token_ids) == {9, 30}


class TestReshaped:
    def test_rows_that_change_leave_the_logits_and_the_others(self) -> None:
        vocab = 300
        logits = make_logits(6, vocab)
        before, best = logits.copy(), logits.argmax(-1).tolist()
        changes: list[dict[str, Any]] = [
            {},
            {"logit_bias": ((7, 100.0),)},
            {"allowed_token_ids": frozenset({11, 12})},
            {"temperature": 1.0, "top_k": 1, "logit_bias": ((8, 100.0),)},
            {},
            {"bad_words": ((best[5],),)},
        ]
        rows = [make_row(vocab=vocab, **change) for change in changes]
        sampler = NativeSampler()
        second = np.argsort(-logits[5])[1]
        allowed = 11 if logits[2, 11] >= logits[2, 12] else 12
        expected = [best[0], 7, allowed, 8, best[4], second]
        for _ in range(2):
            assert sampler.sample(logits, rows, likeliest_of(logits)).token_ids == expected
            np.testing.assert_array_equal(logits, before)
        # another vocabulary, and fewer rows
        narrow = make_logits(1, 40)
        row = make_row(vocab=40, logit_bias=((3, 100.0),))
        assert sampler.sample(narrow, [row], likeliest_of(narrow)).token_ids == [3]

    def test_rows_that_do_not_go_together_are_refused(self) -> None:
        logits = make_logits(2, 20)
        with pytest.raises(ValueError, match=r"\[2, 20\], 1 rows and 2 likeliest"):
            NativeSampler().sample(logits, [make_row(vocab=20)], likeliest_of(logits))

    def test_no_logits_are_enough_for_rows_that_do_not_read_them(self) -> None:
        nothing, likeliest = np.empty((0, 50), dtype=np.float32), np.array([7, -1], dtype=np.int32)
        greedy = make_row(vocab=50)
        native = NativeSampler()
        samples = native.sample(nothing, [greedy, greedy], likeliest)
        assert samples.token_ids[0] == 7 and samples.finite == [True, False]
        for other in (
            make_row(vocab=50, temperature=1.0),
            make_row(vocab=50, logprobs=0),
            make_row(vocab=50, forbidden=np.zeros(50, dtype=np.bool_)),
        ):
            with pytest.raises(ValueError, match="do not go together"):
                native.sample(nothing, [greedy, other], likeliest)

    def test_logprobs_of_any_number_and_of_named_tokens(self) -> None:
        logits = make_logits(3, 100)
        rows = [
            make_row(vocab=100, logprobs=65),
            make_row(vocab=100, logprobs=0, logprob_token_ids=(7, 3)),
            make_row(vocab=100, logprobs=3),
        ]
        samples = NativeSampler().sample(logits, rows, likeliest_of(logits))
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        for index, wanted in ((0, 65), (1, 2), (2, 3)):
            entry = samples.logprobs[index]
            assert entry is not None and entry.rank == 1 and len(entry.top) == wanted
            for token, value in entry.top:
                assert value == pytest.approx(exact[index, token], abs=1e-6)
        named = samples.logprobs[1]
        assert named is not None and {token for token, _ in named.top} == {3, 7}

    def test_masks_of_another_size_are_refused(self) -> None:
        logits = make_logits(1, 20)
        row = make_row(vocab=20, forbidden=np.zeros(21, dtype=np.bool_))
        with pytest.raises(ValueError, match=r"shape \[21\] and type bool .* 20 logits"):
            NativeSampler().sample(logits, [row], likeliest_of(logits))

    @pytest.mark.parametrize("isa", levels())
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_masks(self, isa: str, temperature: float) -> None:
        """Of a grammar, of allowed tokens and of both; over the likeliest token or beside it."""
        vocab = 1003
        logits = make_logits(40, vocab)
        best = logits.argmax(-1)
        random = np.random.default_rng(4)
        masks = random.random((40, vocab)) < 0.99
        masks[np.arange(40), best] = np.arange(40) % 2 == 0
        few = [frozenset(random.permutation(vocab)[:500].tolist()) for _ in range(40)]
        rows = [
            make_row(
                range(3 + i),
                vocab=vocab,
                temperature=temperature,
                forbidden=None if i % 3 == 1 else masks[i],
                allowed_token_ids=None if i % 3 == 0 else few[i],
                logit_bias=((5, 30.0),) if i % 5 == 0 else (),
            )
            for i in range(40)
        ]
        with sampler_of(isa) as sampler:
            token_ids = sampler.sample(logits, rows, likeliest_of(logits)).token_ids
        for index, row in enumerate(rows):
            arguments = reshaped(logits[index], row), row.sampling.params, uniform_of(row)
            assert token_ids[index] in allowed_tokens(*arguments, stable=True)

    def test_logits_that_are_not_contiguous(self) -> None:
        wide = make_logits(8, 60)
        rows = [make_row(vocab=30, temperature=1.0, seed=seed) for seed in range(4)]
        view = wide[::2, ::2]
        expected = NativeSampler().sample(view.copy(), rows, likeliest_of(view))
        got = NativeSampler().sample(view, rows, likeliest_of(view))
        assert got.token_ids == expected.token_ids


class TestTokenLogprobs:
    @pytest.mark.parametrize("isa", levels())
    @pytest.mark.parametrize("vocab", [1, 5, 100, 1025, 5000])
    @pytest.mark.parametrize("kind", ["normal", "ties", "constant"])
    def test_against_float64(self, isa: str, vocab: int, kind: str) -> None:
        logits = make_logits(5, vocab)
        if kind == "ties":
            logits = np.round(logits)
        elif kind == "constant":
            logits[:] = -7.5
        token_ids = np.random.default_rng(3).integers(0, vocab, 5).tolist()
        counts = [0, 1, 20, 3, 64]
        exact = logits.astype(np.float64)
        exact -= np.logaddexp.reduce(exact, axis=1, keepdims=True)
        with sampler_of(isa) as sampler:
            entries = token_logprobs(logits, token_ids, counts, sampler._model)
        for index, entry in enumerate(entries):
            row, token = exact[index], token_ids[index]
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token], abs=2e-6)
            assert entry.rank == 1 + np.count_nonzero(logits[index] > logits[index, token])
            order = np.argsort(-logits[index], kind="stable")[: counts[index]]
            assert [name for name, _ in entry.top] == order.tolist()
            values = [value for _, value in entry.top]
            assert values == pytest.approx(row[order].tolist(), abs=2e-6)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_rows_that_are_not_finite_harm_nobody(self, value: float) -> None:
        logits = make_logits(3, 5000)
        good = token_logprobs(logits, [5, 6, 7], [20, 20, 20])
        logits[1] = value
        result = token_logprobs(logits, [5, 6, 7], [20, 20, 20])
        assert [result[0], result[2]] == [good[0], good[2]]

    def test_no_rows(self) -> None:
        assert token_logprobs(make_logits(0, 10), [], []) == []

    def test_what_cannot_be_answered_is_refused(self) -> None:
        logits = make_logits(2, 100)
        with pytest.raises(ConfigError, match=r"tokens\[1\] is 100, the vocabulary has 100"):
            token_logprobs(logits, [1, 100], [1, 1])
        with pytest.raises(ConfigError, match="the 65 likeliest of 100 tokens, at most 64"):
            token_logprobs(logits, [1, 2], [1, 65])
        with pytest.raises(ValueError, match=r"\[2, 100\], 1 tokens and 2 counts"):
            token_logprobs(logits, [1], [1, 1])
