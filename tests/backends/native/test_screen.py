"""The likeliest token without the whole head: the same as with it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, unavailable_reason, variants
from paceline.checkpoints.config import ModelConfig
from tests.backends.native.reference import Weights, random_weights, rope_tables, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

CONFIG = tiny_config(vocab_size=2000, hidden_size=128, tie_word_embeddings=False)


def _make(weights: Weights, config: ModelConfig = CONFIG, **options: object) -> NativeModel:
    values: dict[str, object] = {"dtype": "q4", "num_blocks": 16, "threads": 2}
    return NativeModel(
        config,
        weights.items(),
        rope_tables(config, 64),
        **(values | options),  # type: ignore[arg-type]
    )


def _likeliest(
    model: NativeModel, ids: NDArray[np.int64], *, needs_logits: bool
) -> NDArray[np.int32]:
    """Of first tokens, a sequence each."""
    count = len(ids)
    logits = model.forward(
        ids,
        np.zeros(count, dtype=np.int64),
        np.arange(count + 1),
        np.arange(count)[:, None],
        np.arange(count),
        needs_logits=needs_logits,
    )
    assert logits.shape == (count if needs_logits else 0, CONFIG.vocab_size)
    if needs_logits and (model.likeliest >= 0).all():
        np.testing.assert_array_equal(model.likeliest, logits.argmax(-1))
    return model.likeliest.copy()


def _compare(model: NativeModel, rows: int, steps: int, seed: int) -> set[int]:
    """The tokens that were found, the same in both ways."""
    random = np.random.default_rng(seed)
    found: set[int] = set()
    for _ in range(steps):
        ids = random.integers(0, CONFIG.vocab_size, rows)
        expected = _likeliest(model, ids, needs_logits=True)
        np.testing.assert_array_equal(_likeliest(model, ids, needs_logits=False), expected)
        found |= set(expected.tolist())
    return found


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["int8", "q4"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_same_token_as_with_logits(isa: str, dtype: str, rows: int) -> None:
    model = _make(random_weights(CONFIG, 1), dtype=dtype, isa=isa)
    assert len(_compare(model, rows, 12, seed=2)) > 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_formats_have_nothing_to_screen(dtype: str) -> None:
    assert len(_compare(_make(random_weights(CONFIG, 1), dtype=dtype), 2, 5, seed=2)) > 3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_heads_that_differ_in_their_lower_halves_alone(threads: int) -> None:
    """All rows within a hundredth of each other: upper halves say nothing about the order."""
    weights = random_weights(CONFIG, 3)
    head = weights["lm_head.weight"]
    head[:] = head[0] + head * np.float32(0.01)
    assert len(_compare(_make(weights, threads=threads), 2, 20, seed=4)) > 10


def test_too_many_candidates_end_in_the_whole_product() -> None:
    """Of 256 panels every one could hold the largest."""
    config = tiny_config(vocab_size=8192, hidden_size=128, tie_word_embeddings=False)
    weights = random_weights(config, 5)
    head = weights["lm_head.weight"]
    head[:] = head[0] + head * np.float32(0.001)
    model = _make(weights, config)
    for token in range(8):
        found = []
        for needs_logits in (True, False):
            model.forward(
                *(np.array(value) for value in ([token], [0], [0, 1], [[0]], [0])),
                needs_logits=needs_logits,
            )
            found += model.likeliest.tolist()
        assert found[0] == found[1]


def test_the_first_of_equals() -> None:
    weights = random_weights(CONFIG, 6)
    head = weights["lm_head.weight"]
    # each twice, in different panels
    head[1000:] = head[:1000]
    found = _compare(_make(weights), 2, 20, seed=7)
    assert len(found) > 10
    assert max(found) < 1000


def test_infinities_are_told() -> None:
    weights = random_weights(CONFIG, 8)
    weights["lm_head.weight"][1999, 5] = np.inf
    model = _make(weights)
    ids = np.array([3, 4])
    for needs_logits in (True, False):
        assert _likeliest(model, ids, needs_logits=needs_logits).tolist() == [-1, -1]
