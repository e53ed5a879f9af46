"""Frequencies that no tiny model of transformers shows; the others are in test_parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.backends.torch.rope import RotaryTable, inverse_frequencies, longest_sequence
from paceline.checkpoints.config import ModelConfig, RopeConfig


def make_config(max_position_embeddings: int = 64, **rope: Any) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=RopeConfig(**rope),
        tie_word_embeddings=True,
    )


def test_factors_of_a_gguf_divide_the_frequencies() -> None:
    """llama.cpp stores Llama 3's scaling as divisors."""
    scaled: dict[str, Any] = {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 32,
    }
    plain, _ = inverse_frequencies(make_config(), 64)
    expected, _ = inverse_frequencies(make_config(**scaled), 64)
    factors = tuple((plain / expected).tolist())
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    got, attention_factor = inverse_frequencies(make_config(freq_factors=factors), 64)
    torch.testing.assert_close(got, expected)
    assert attention_factor == 1.0


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 64),
        ({"kind": "linear", "factor": 4.0}, 64),
        ({"kind": "dynamic", "factor": 4.0}, 256),
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 64}, 256),
        # a config whose positions already include the factor
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 16}, 64),
    ],
)
def test_longest_sequence(rope: dict[str, Any], expected: int) -> None:
    assert longest_sequence(make_config(**rope)) == expected


def test_explicit_attention_factor() -> None:
    for kind in ("yarn", "longrope"):
        config = make_config(
            kind=kind,
            factor=4.0,
            original_max_position=16,
            attention_factor=1.75,
            short_factor=(1.0,) * 4,
            long_factor=(2.0,) * 4,
        )
        assert inverse_frequencies(config, 64)[1] == 1.75


def test_rotation_of_one_pair() -> None:
    """Dimension 1 turns against dimension 5 by position * frequency[1]; lengths stay."""
    config = make_config()
    table = RotaryTable(config, 64, dtype=torch.float64, device=torch.device("cpu"))
    heads = torch.zeros(2, 1, 8, dtype=torch.float64)
    heads[:, 0, 1] = 2.0
    table.rotate_(heads, table.rows(torch.tensor([0, 5])))
    angle = torch.tensor(5 * 10000.0 ** (-2 / 8), dtype=torch.float64)
    assert heads[0, 0].tolist() == [0, 2.0, 0, 0, 0, 0, 0, 0]
    assert heads[1, 0, 1] == pytest.approx(float(2 * angle.cos()), abs=1e-6)
    assert heads[1, 0, 5] == pytest.approx(float(2 * angle.sin()), abs=1e-6)
    assert float(heads[1].norm()) == pytest.approx(2.0, abs=1e-6)
