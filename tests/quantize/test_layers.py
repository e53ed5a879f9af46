"""Both streams of every architecture: the exact one is what the model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.attention import RotaryTable, TorchAttention
from paceline.backends.torch.model import Decoder
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.quantize import layers
from paceline.quantize.layers import LayerRounding, _Sum, _Wanted
from paceline.quantize.output import matrices_of
from tests.backends.torch.models import VOCAB, save_model

LENGTH = 24
# whole blocks of 32 weights
SIZES = {"hidden_size": 96, "intermediate_size": 128}
NAMES = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "gpt-oss", "granite", "smollm3", "olmo2")


def hidden_states(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    """Return the sum of all layers for one sequence, [tokens, hidden]."""
    config, cpu = checkpoint.config, torch.device("cpu")
    weights = load_weights(checkpoint, dtype=torch.float32, device=cpu)
    tables = [
        RotaryTable(config, LENGTH, dtype=torch.float32, device=cpu, rope=rope)
        for rope in (config.rope, config.sliding_rope)
        if rope is not None
    ]
    decoder = Decoder(config, weights, *tables)
    attention = TorchAttention(
        config,
        num_blocks=2,
        block_size=16,
        dtype=torch.float32,
        device=cpu,
        sinks=[layer.sinks for layer in weights.layers],
    )
    attention.clear_blocks((0, 1))
    attention.prepare(
        AttentionBatch(np.zeros(1, dtype=np.int64), np.array([LENGTH]), np.array([[0, 1]]))
    )
    decoder.keep_inputs((config.num_hidden_layers,))
    with torch.inference_mode():
        every = torch.arange(LENGTH)
        decoder.hidden(tokens, every, every, attention)
    return decoder.kept[0]


@pytest.mark.parametrize("name", NAMES)
def test_streams(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, name, **SIZES)
    checkpoint = open_checkpoint(tmp_path)
    windows = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, (3, LENGTH)))
    kinds = dict.fromkeys(matrices_of(checkpoint), GGUFType.Q5_1)
    rounding = LayerRounding(checkpoint, windows, kinds)
    found: set[str] = set()
    for index in range(checkpoint.config.num_hidden_layers):
        tensors, lost = rounding.round_layer(index)
        found |= set(tensors)
        assert 0 < lost < 0.05
    assert found == set(kinds)
    assert any("mlp" in name and "down_proj" in name for name in found)
    for row, tokens in enumerate(windows):
        expected = hidden_states(checkpoint, tokens)
        got = rounding.exact[row * LENGTH : (row + 1) * LENGTH]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_matrix_that_is_not_rounded_changes_nothing(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)
    windows = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    rounding = LayerRounding(checkpoint, windows, {})
    tensors, lost = rounding.round_layer(0)
    assert not tensors and lost == 0


@pytest.mark.parametrize(("name", "sums"), [("llama", 2), ("granite", 2), ("gemma2", 0)])
def test_products_are_asked_for_what_the_sum_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sums: int
) -> None:
    save_model(tmp_path, name, **SIZES)
    checkpoint = open_checkpoint(tmp_path)
    windows = torch.from_numpy(np.random.default_rng(4).integers(0, VOCAB, (4, LENGTH)))
    rounding = LayerRounding(
        checkpoint, windows, dict.fromkeys(matrices_of(checkpoint), GGUFType.Q4_1)
    )
    asked: list[tuple[bool, torch.Tensor, torch.Tensor]] = []

    def kept(
        weight: torch.Tensor, x: torch.Tensor, moments: torch.Tensor, wanted: _Wanted
    ) -> torch.Tensor:
        asked.append((isinstance(wanted, _Sum), wanted.shift(weight, x, moments), x))
        return weight

    monkeypatch.setattr(layers, "_corrected", kept)
    monkeypatch.setattr(
        layers, "_in_bits", lambda kind, weight, moments: (weight, np.zeros((len(weight), 1)))
    )
    # weights that are not rounded lose nothing, so nothing is asked for
    rounding.round_layer(0)
    assert len(asked) == 4 and sum(one[0] for one in asked) == sums
    assert all(shift.norm() < 1e-4 * x.square().sum() for _, shift, x in asked)
    asked.clear()
    # norms hide this lack from all products, but not from what is asked of the sum
    lack = 1e-2 * rounding.exact
    rounding.rounded *= 0.99
    rounding.round_layer(1)
    _, shift, x = asked[1]
    wanted = lack.t() @ x / checkpoint.config.residual_scale
    assert ((shift - wanted).norm() < 0.01 * wanted.norm()) == bool(sums)


def test_a_weight_learns_what_is_wanted() -> None:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(256, 32, generator=random)
    weight, other = torch.randn(2, 16, 32, generator=random)
    bias = torch.randn(16, generator=random)
    wanted = _Sum(torch.zeros(256, 16), 0.5 * (x @ other.t() + bias), 0.5, bias)
    learned = layers._corrected(weight, x, x.t() @ x, wanted)
    assert (learned - other).norm() < 0.4 * (weight - other).norm()
