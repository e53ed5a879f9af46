"""The likeliest token without the whole head: the same as with it."""

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
# one group of columns that are rotated together, and a panel more than may be computed one by one
NARROW = tiny_config(vocab_size=8192, hidden_size=64, tie_word_embeddings=False)


def _make(weights: Weights, config: ModelConfig = CONFIG, **options: object) -> NativeModel:
    values: dict[str, object] = {"dtype": "q4", "num_blocks": 16, "threads": 2, "screen_head": True}
    return NativeModel(
        config,
        weights.items(),
        rope_tables(config, 64),
        NativeSettings(**(values | options)),  # type: ignore[arg-type]
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
    assert len(logits) == (count if needs_logits else 0)
    if needs_logits and (model.likeliest >= 0).all():
        np.testing.assert_array_equal(model.likeliest, logits.argmax(-1))
    return model.likeliest.copy()


def _compare(
    model: NativeModel, rows: int, steps: int, seed: int, vocab: int = CONFIG.vocab_size
) -> set[int]:
    """The tokens that were found, the same in both ways."""
    random = np.random.default_rng(seed)
    found: set[int] = set()
    for _ in range(steps):
        ids = random.integers(0, vocab, rows)
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
    # a third row is one too many
    settled, whole = (12 * rows, 0) if rows < 3 else (0, 12 * rows)
    assert model.choices() == {"settled": settled, "too_many": 0, "whole": whole}


@pytest.mark.parametrize("dtype", ["int8", "q4"])
def test_the_whole_head_is_read_unless_screening_was_asked_for(dtype: str) -> None:
    model = _make(random_weights(CONFIG, 1), dtype=dtype, screen_head=False)
    _compare(model, 2, 5, seed=2)
    assert model.choices() == {"settled": 0, "too_many": 0, "whole": 10}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_formats_have_nothing_to_screen(dtype: str) -> None:
    model = _make(random_weights(CONFIG, 1), dtype=dtype)
    assert len(_compare(model, 2, 5, seed=2)) > 3
    assert model.choices() == {"settled": 0, "too_many": 0, "whole": 10}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_heads_that_differ_in_their_lower_halves_alone(threads: int) -> None:
    """All rows within a hundredth of each other: upper halves say nothing about the order."""
    weights = random_weights(CONFIG, 3)
    head = weights["lm_head.weight"]
    head[:] = head[0] + head * np.float32(0.01)
    model = _make(weights, threads=threads)
    assert len(_compare(model, 2, 20, seed=4)) > 10
    # 63 panels are never too many
    assert model.choices() == {"settled": 40, "too_many": 0, "whole": 0}


def test_too_many_candidates_end_in_the_whole_product() -> None:
    """Of 256 panels every one could hold the largest."""
    config = tiny_config(vocab_size=8192, hidden_size=128, tie_word_embeddings=False)
    weights = random_weights(config, 5)
    head = weights["lm_head.weight"]
    few = _make(weights, config)
    _compare(few, 1, 8, seed=6, vocab=8192)
    assert few.choices() == {"settled": 8, "too_many": 0, "whole": 0}
    head[:] = head[0] + head * np.float32(0.001)
    many = _make(weights, config)
    _compare(many, 1, 8, seed=6, vocab=8192)
    assert many.choices() == {"settled": 0, "too_many": 8, "whole": 0}


def _towards(weights: Weights, config: ModelConfig, x: NDArray[np.float32]) -> None:
    """Let the hidden state after the last layer be ``x``, up to its length, for every token."""
    for layer in range(config.num_hidden_layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"][:] = 0
    weights["model.embed_tokens.weight"][:] = x
    weights["model.norm.weight"][:] = 1


@pytest.mark.parametrize("rival", [0.975, 0.98, 0.99])
@pytest.mark.parametrize("columns", [(0,), (5,), (1, 2), (3, 7, 40)])
def test_a_row_of_few_columns(columns: tuple[int, ...], rival: float) -> None:
    """Its lower halves are no random numbers: what they add to a logit is far beyond the limit."""
    weights = random_weights(NARROW, 9)
    # of lengths that no other row comes near
    x = np.zeros(64, dtype=np.float32)
    x[list(columns)] = [1.0, 0.87, 0.61][: len(columns)]
    _towards(weights, NARROW, x)
    head = weights["lm_head.weight"]
    head *= np.float32(0.1)
    head[5000] = x
    # a row that is not quite as far, with lower halves as any
    noise = head[100] - x * (head[100] @ x / (x @ x))
    head[100] = noise + x * np.float32(rival)
    model = _make(weights, NARROW)
    ids = np.array([7])
    assert _likeliest(model, ids, needs_logits=True).tolist() == [5000]
    assert _likeliest(model, ids, needs_logits=False).tolist() == [5000]
    assert model.choices() == {"settled": 1, "too_many": 0, "whole": 0}


def test_a_group_of_few_values_among_many() -> None:
    """One group of a wide row is enough, where the others are zero beside it in ``x``."""
    config = tiny_config(vocab_size=8192, hidden_size=512, tie_word_embeddings=False)
    weights = random_weights(config, 10)
    x = np.zeros(512, dtype=np.float32)
    x[64] = 1
    _towards(weights, config, x)
    head = weights["lm_head.weight"]
    # in its own group all its values are equal, and no value elsewhere is larger
    head[5000, 64:128] = 0
    head[5000, 64] = 16 * np.abs(head[5000]).max()
    head[100, 64] = 0.98 * head[5000, 64]
    model = _make(weights, config)
    ids = np.array([7])
    expected = _likeliest(model, ids, needs_logits=True).tolist()
    assert expected == [5000]
    assert _likeliest(model, ids, needs_logits=False).tolist() == expected
    assert model.choices() == {"settled": 1, "too_many": 0, "whole": 0}


def test_heads_of_unusual_rows_are_not_screened() -> None:
    """More panels than are worth computing each time."""
    weights = random_weights(NARROW, 11)
    head = weights["lm_head.weight"]
    few, many = head.copy(), head.copy()
    for row in range(0, 8192, 32):
        target = few if row < 16 * 32 else many
        target[row, 1:] = 0
    for rows, choice in ((few, "settled"), (many, "whole")):
        weights["lm_head.weight"] = rows
        model = _make(weights, NARROW)
        assert len(_compare(model, 1, 8, seed=12, vocab=8192)) > 4
        assert model.choices()[choice] == 8


def test_the_first_of_equals() -> None:
    weights = random_weights(CONFIG, 6)
    head = weights["lm_head.weight"]
    # each twice, in different panels
    head[1000:] = head[:1000]
    found = _compare(_make(weights), 2, 20, seed=7)
    assert len(found) > 10
    assert max(found) < 1000


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_soft_capped_logits(isa: str, rows: int, softcap: float) -> None:
    """Of a deviation of about 1, so the largest are bent."""
    capped = replace(CONFIG, logits_softcap=softcap)
    model = _make(random_weights(CONFIG, 1), capped, isa=isa)
    assert len(_compare(model, rows, 12, seed=2)) > 6
    assert model.choices() == {"settled": 12 * rows, "too_many": 0, "whole": 0}


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
    assert capped.choices()["settled"] == 40
    ids = np.random.default_rng(7).integers(0, 2000, 2)
    first = _likeliest(capped, ids, needs_logits=False)
    assert (first < 32).all()
    assert (_likeliest(plain, ids, needs_logits=False) > first).all()


def test_too_many_at_the_cap_end_in_the_whole_product() -> None:
    config = replace(NARROW, logits_softcap=1.0)
    weights = random_weights(config, 5)
    weights["lm_head.weight"] *= np.float32(100)
    model = _make(weights, config)
    assert max(_compare(model, 1, 8, seed=6, vocab=8192)) < 32
    assert model.choices() == {"settled": 0, "too_many": 8, "whole": 0}


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_infinities_are_told(softcap: float | None) -> None:
    weights = random_weights(CONFIG, 8)
    weights["lm_head.weight"][1999, 5] = np.inf
    model = _make(weights, replace(CONFIG, logits_softcap=softcap))
    ids = np.array([3, 4])
    for needs_logits in (True, False):
        assert _likeliest(model, ids, needs_logits=needs_logits).tolist() == [-1, -1]
