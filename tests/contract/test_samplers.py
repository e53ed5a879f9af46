"""Both samplers on the same rows: what torch samples and what the native path samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from paceline.backends.native.sampling import NativeSampler
from paceline.backends.runner.sampling import SampleRow
from paceline.backends.torch.sampler import sample
from tests.backends.native.reference import random_weights, rope_tables, tiny_config
from tests.backends.sampling_reference import (
    allowed_tokens,
    likeliest_of,
    make_row,
    reshaped,
    uniform_of,
)

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

VOCABS = st.one_of(st.integers(1, 40), st.integers(41, 5000))
KINDS = ("normal", "peaked", "flat", "steps", "constant", "huge")


@pytest.fixture(scope="module")
def native() -> Iterator[NativeSampler]:
    config = tiny_config(num_hidden_layers=1)
    weights = random_weights(config, 0).items()
    model = NativeModel(
        config, weights, rope_tables(config, 16), NativeSettings(dtype="float32", num_blocks=1)
    )
    yield NativeSampler(model)
    model.close()


def make_logits(kind: str, vocab: int, random: np.random.Generator) -> NDArray[np.float32]:
    values = random.normal(0, 1, vocab)
    if kind == "normal":
        values *= 3
    elif kind == "peaked":
        values *= 12
    elif kind == "flat":
        values *= 0.01
    elif kind == "steps":
        # ties everywhere
        values = np.round(values * 2)
    elif kind == "constant":
        values[:] = 2.5
    else:
        values *= 1e30
    return values.astype(np.float32)


@st.composite
def params(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Settings of one row, each absent more often than not."""
    few = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4)
    rarely = st.integers(0, 3).map(lambda n: n == 0)
    result: dict[str, Any] = {
        "temperature": draw(st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 100.0))),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
    }
    if draw(st.booleans()):
        result["top_k"] = draw(st.one_of(st.integers(1, 70), st.integers(1, 6000)))
    if draw(st.booleans()):
        result["top_p"] = draw(st.floats(1e-6, 1.0))
    if draw(st.booleans()):
        result["min_p"] = draw(st.one_of(st.floats(0.0, 1.0), st.floats(1e-9, 1e-3)))
    if draw(rarely):
        values = st.floats(-100, 100)
        result["logit_bias"] = tuple((token, draw(values)) for token in draw(few))
    if draw(rarely):
        result["repetition_penalty"] = draw(st.floats(0.1, 10.0))
        result["presence_penalty"] = draw(st.floats(-2, 2))
        result["frequency_penalty"] = draw(st.floats(-2, 2))
    if draw(rarely):
        result["min_tokens"] = draw(st.integers(0, 8))
        result["eos_token_ids"] = frozenset(draw(few))
        result["stop_token_ids"] = frozenset({vocab + 7, *draw(few)})
    if draw(rarely):
        result["allowed_token_ids"] = frozenset(draw(few))
    if draw(rarely):
        words = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=2).map(tuple)
        result["bad_words"] = tuple(draw(st.lists(words, min_size=1, max_size=5)))
    if draw(rarely):
        result["logprobs"] = draw(st.integers(0, 20))
    return result


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], list[SampleRow]]:
    vocab = draw(VOCABS)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 5))
    logits = np.stack(
        [make_logits(draw(st.sampled_from(KINDS)), vocab, random) for _ in range(count)]
    )
    rows = []
    for index in range(count):
        prompt, output = draw(st.integers(1, 4)), draw(st.integers(0, 10))
        tokens = random.integers(0, vocab, prompt + output)
        forbidden = None
        if draw(st.integers(0, 4)) == 0:
            forbidden = random.random(vocab) < draw(st.sampled_from([0.1, 0.9, 1.0]))
        rows.append(
            make_row(tokens, prompt, vocab=vocab, forbidden=forbidden, **draw(params(vocab)))
        )
        broken = draw(st.integers(0, 9))
        if broken == 0:
            value = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
            logits[index, draw(st.integers(0, vocab - 1))] = value
        elif broken == 1:
            logits[index] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return logits, rows


def check(native: NativeSampler, logits: NDArray[np.float32], rows: list[SampleRow]) -> None:
    likeliest = likeliest_of(logits)
    before = logits.copy()
    ours = native.sample(logits, rows, likeliest)
    theirs = sample(torch.from_numpy(logits), rows, likeliest)
    np.testing.assert_array_equal(logits, before)
    assert ours.finite == theirs.finite == (likeliest >= 0).tolist()
    for index, row in enumerate(rows):
        if not ours.finite[index]:
            assert ours.logprobs[index] is theirs.logprobs[index] is None
            continue
        token = ours.token_ids[index]
        changed = reshaped(logits[index], row)
        arguments = (changed, row.sampling.params, uniform_of(row))
        assert token in allowed_tokens(*arguments, stable=True)
        assert theirs.token_ids[index] in allowed_tokens(*arguments, stable=False)
        if row.sampling.params.temperature == 0.0 or token == -1:
            assert token == theirs.token_ids[index]
        if token >= 0:
            assert changed[token] > -np.inf
        _check_logprobs(logits[index], row, ours.logprobs[index], token)


def _check_logprobs(logits: NDArray[np.float32], row: SampleRow, entry: Any, token: int) -> None:
    count = row.sampling.params.logprobs
    if count is None or token < 0:
        assert entry is None
        return
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact)
    # float32 holds logits this well
    close = max(1.0, float(np.abs(logits).max())) * 2.0**-20
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(exact[token], abs=close)
    assert entry.rank == 1 + np.count_nonzero(logits > logits[token])
    order = np.argsort(-logits, kind="stable")[:count]
    assert [name for name, _ in entry.top] == order.tolist()
    assert [value for _, value in entry.top] == pytest.approx(exact[order].tolist(), abs=close)


@settings(
    max_examples=50,
    deadline=None,
    # the sampler keeps nothing that a later example could see
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_same_rules_same_tokens(
    native: NativeSampler, case: tuple[NDArray[np.float32], list[SampleRow]]
) -> None:
    check(native, *case)


def test_every_filter_on_every_shape_of_distribution(native: NativeSampler) -> None:
    random = np.random.default_rng(5)
    for vocab in (1, 17, 64, 257, 1000, 4999):
        rows, logits = [], []
        for kind in KINDS:
            for top_k in (0, 1, 50, 700, 10_000):
                for top_p in (0.05, 0.9, 1.0):
                    for min_p in (0.0, 1e-6, 0.1):
                        logits.append(make_logits(kind, vocab, random))
                        rows.append(
                            make_row(
                                np.arange(3 + len(rows) % 50) % vocab,
                                vocab=vocab,
                                temperature=float(random.choice([0.3, 1.0, 8.0])),
                                top_k=top_k,
                                top_p=top_p,
                                min_p=min_p,
                                seed=len(rows),
                            )
                        )
        check(native, np.stack(logits), rows)


def test_no_token_left_is_told_alike(native: NativeSampler) -> None:
    random = np.random.default_rng(6)
    vocab = 50
    logits = np.stack([make_logits("normal", vocab, random) for _ in range(6)])
    all_ids = frozenset(range(vocab))
    everything = np.ones(vocab, dtype=np.bool_)
    rows = [
        make_row(vocab=vocab, forbidden=everything),
        make_row(vocab=vocab, forbidden=everything, temperature=1.0, top_p=0.5),
        make_row(vocab=vocab, allowed_token_ids=frozenset({3}), bad_words=((3,),)),
        make_row(vocab=vocab, min_tokens=1, stop_token_ids=all_ids),
        make_row(vocab=vocab, min_tokens=1, stop_token_ids=all_ids, temperature=1.0),
        # nothing but the end is left: then it is chosen before min_tokens
        make_row(
            vocab=vocab,
            min_tokens=1,
            stop_token_ids=frozenset({7}),
            forbidden=np.arange(vocab) != 7,
        ),
    ]
    likeliest = likeliest_of(logits)
    assert native.sample(logits, rows, likeliest).token_ids == [-1, -1, -1, -1, -1, 7]
    assert sample(torch.from_numpy(logits), rows, likeliest).token_ids == [-1, -1, -1, -1, -1, 7]


def test_a_tiny_penalty_does_not_lift_a_ban(native: NativeSampler) -> None:
    """Zero, which 1e-300 is in float32, times minus infinity would be no number."""
    logits = np.zeros((2, 20), dtype=np.float32)
    logits[:, 4] = -1
    rows = [
        make_row(
            [4, 5, 6],
            vocab=20,
            min_tokens=1,
            eos_token_ids=frozenset({4}),
            repetition_penalty=1e-300,
            temperature=float(temperature),
        )
        for temperature in range(2)
    ]
    likeliest = likeliest_of(logits)
    assert native.sample(logits, rows, likeliest).token_ids[0] == 0
    assert 4 not in native.sample(logits, rows, likeliest).token_ids
    assert sample(torch.from_numpy(logits), rows, likeliest).token_ids[0] == 0
    assert 4 not in sample(torch.from_numpy(logits), rows, likeliest).token_ids
