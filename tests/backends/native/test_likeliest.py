"""The likeliest token of a step that wants no logits: the same as with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason, variants
from paceline.checkpoints.model.config import ModelConfig
from tests.backends.native.reference import Weights, random_weights, rope_tables, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

CONFIG = tiny_config(vocab_size=2000, hidden_size=128, tie_word_embeddings=False)


def _make(weights: Weights, config: ModelConfig = CONFIG, **options: object) -> NativeModel:
    values: dict[str, object] = {"dtype": "q4", "num_blocks": 16, "threads": 2}
    return NativeModel(
        config,
        weights.items(),
        rope_tables(config, 64),
        NativeSettings(**(values | options)),  # type: ignore[arg-type]
    )


def _likeliest(
    model: NativeModel, ids: NDArray[np.int64], *, needs_logits: bool
) -> NDArray[np.int32]:
    """Return those of first tokens, a sequence each."""
    count = len(ids)
    logits = model.forward(
        ids,
        np.zeros(count, dtype=np.int64),
        np.arange(count + 1),
        np.arange(count)[:, None],
        np.arange(count),
        needs_logits=needs_logits,
    )
    assert len(logits) == (count if needs_logits else 0)
    if needs_logits and (model.likeliest >= 0).all():
        np.testing.assert_array_equal(model.likeliest, logits.argmax(-1))
    return model.likeliest.copy()


def _compare(model: NativeModel, rows: int, steps: int, seed: int) -> set[int]:
    """Return the tokens that were found, the same in both ways."""
    random = np.random.default_rng(seed)
    found: set[int] = set()
    for _ in range(steps):
        ids = random.integers(0, CONFIG.vocab_size, rows)
        expected = _likeliest(model, ids, needs_logits=True)
        np.testing.assert_array_equal(_likeliest(model, ids, needs_logits=False), expected)
        found |= set(expected.tolist())
    return found


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
def test_the_same_token_as_with_logits(isa: str, dtype: str) -> None:
    model = _make(random_weights(CONFIG, 1), dtype=dtype, isa=isa)
    for rows in (1, 3):
        assert len(_compare(model, rows, 12, seed=2)) > 6


def test_the_first_of_equals() -> None:
    weights = random_weights(CONFIG, 6)
    head = weights["lm_head.weight"]
    # each twice, in different panels
    head[1000:] = head[:1000]
    found = _compare(_make(weights), 2, 20, seed=7)
    assert len(found) > 10
    assert max(found) < 1000


@pytest.mark.parametrize("isa", variants())
def test_the_first_of_those_that_a_cap_makes_equal(isa: str) -> None:
    """A third of the logits are at the cap: of the first panel, and of some later ones that alone
    are larger before it."""
    weights = random_weights(CONFIG, 6)
    weights["lm_head.weight"] *= np.linspace(30, 90, 2000, dtype=np.float32)[:, None]
    plain, capped = (
        _make(weights, replace(CONFIG, logits_softcap=cap), isa=isa) for cap in (None, 1.0)
    )
    assert len(_compare(capped, 2, 20, seed=7)) > 3
    ids = np.random.default_rng(7).integers(0, 2000, 2)
    first = _likeliest(capped, ids, needs_logits=False)
    assert (first < 32).all()
    assert (_likeliest(plain, ids, needs_logits=False) > first).all()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_infinities_are_told(softcap: float | None) -> None:
    weights = random_weights(CONFIG, 8)
    weights["lm_head.weight"][1999, 5] = np.inf
    model = _make(weights, replace(CONFIG, logits_softcap=softcap))
    ids = np.array([3, 4])
    for needs_logits in (True, False):
        assert _likeliest(model, ids, needs_logits=needs_logits).tolist() == [-1, -1]
