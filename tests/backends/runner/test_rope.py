"""Frequencies that no tiny model of transformers shows; the others are in test_parity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.runner import rope
from paceline.backends.runner.rope import inverse_frequencies, rotary_tables
from paceline.checkpoints.model.config import ModelConfig, RopeConfig
from paceline.errors import CheckpointError


def make_config(max_position_embeddings: int = 64, head_dim: int = 8, **rope: Any) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
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
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert attention_factor == 1.0


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, 64),
        ({"kind": "linear", "factor": 4.0}, 64),
        ({"kind": "dynamic", "factor": 4.0}, 256),
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 64}, 256),
        # a config whose positions already include the factor
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 16}, 64),
    ],
)
def test_longest_sequence(scaling: dict[str, Any], expected: int) -> None:
    assert make_config(**scaling).longest == expected


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


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_are_those_of_pytorch(theta: float, head_dim: int) -> None:
    """transformers computes them in float32 with PyTorch, whose powers, cosines and sines are right
    to an ulp. Where its frequency is another float32, so is the angle, by as many ulps."""
    length = 4096
    config = make_config(length, head_dim=head_dim, theta=theta)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    expected = 1.0 / theta**exponents
    frequencies, factor = inverse_frequencies(config, length)
    assert factor == 1.0
    np.testing.assert_array_max_ulp(frequencies, expected.numpy(), maxulp=1)
    same = frequencies == expected.numpy()
    assert same.mean() > 0.9
    angles = torch.arange(length, dtype=torch.float32)[:, None] * expected
    cos, sin = rotary_tables(config, length)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.flags.c_contiguous and sin.flags.c_contiguous
    for got, by_torch in ((cos, angles.cos().numpy()), (sin, angles.sin().numpy())):
        np.testing.assert_allclose(got[:, same], by_torch[:, same], rtol=0, atol=2**-24)
        np.testing.assert_allclose(got, by_torch, rtol=0, atol=length * 2.0**-23)


def test_the_factor_is_on_both_tables() -> None:
    config = make_config(
        64, kind="yarn", factor=4.0, original_max_position=16, attention_factor=1.5
    )
    cos, sin = rotary_tables(config, 64)
    np.testing.assert_allclose(cos**2 + sin**2, 2.25, rtol=1e-6)


def test_tables_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(64, theta=500.0)
    whole = rotary_tables(config, 64)
    for part in (1, 7, 32, 63):
        monkeypatch.setattr(rope, "_PART", part)
        np.testing.assert_array_equal(rotary_tables(config, 64), whole)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "yarn", "theta": 1.0}, "theta is 1.0, must be above 1 for rope type yarn"),
        ({"kind": "yarn", "factor": 1e300}, "factor is 1e\\+300, must be at most 2147483648"),
        (
            {"kind": "longrope", "factor": 2.0, "original_max_position": 1},
            "longrope needs original_max_position_embeddings above 1",
        ),
        ({"kind": "dynamic", "factor": 2.0, "head_dim": 2}, "head_dim=2 is too small"),
    ],
)
def test_what_has_no_frequencies_is_refused(values: dict[str, Any], message: str) -> None:
    """Divisions by zero, and more positions than numbers for them."""
    with pytest.raises(CheckpointError, match=message):
        make_config(**values)
