"""Models that compute what another does, with weights that are harder or other to round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.quantize.__main__ import bits_of_layers
from benchmarks.quantize.twin import mix, widen, write_twin
from paceline.checkpoints.open import open_checkpoint
from paceline.quantize.check import layer_by_layer
from tests.checkpoints.builders import HIDDEN, VOCAB, write_gguf


def logits(path: Path) -> NDArray[np.float32]:
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 12))
    with layer_by_layer(path, tokens) as forward:
        return forward(tokens, 0).copy()


def test_a_twin_and_its_widened_form_compute_the_same(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    twin, wide = tmp_path / "twin.gguf", tmp_path / "wide.gguf"
    write_twin(source, twin)
    widen(twin, wide)
    published, permuted, widened = map(logits, (source, twin, wide))
    spread = published.std()
    # the twin's matrices are in float16
    assert np.abs(permuted - published).mean() < 0.01 * spread
    assert np.abs(widened - permuted).max() < 0.001 * spread
    config = open_checkpoint(wide).config
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (256, 32, 8)
    assert bits_of_layers(wide) == 16
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = (open_checkpoint(path).tensor(name) for path in (source, twin))
    assert np.abs(before - after).max() > 1 and before.shape[1] == HIDDEN


def test_a_mixture_computes_what_its_source_does(tmp_path: Path) -> None:
    twin, mixture = tmp_path / "twin.gguf", tmp_path / "mixture.gguf"
    write_twin(write_gguf(tmp_path / "model.gguf"), twin)
    mix(twin, mixture)
    same = logits(twin)
    assert np.abs(logits(mixture) - same).max() < 0.001 * same.std()
    checkpoint = open_checkpoint(mixture)
    assert (checkpoint.config.num_experts, checkpoint.config.experts_per_token) == (4, 2)
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    first, second = (checkpoint.tensor(name.format(expert)) for expert in (0, 1))
    # the same rows in another order
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first[:, 0]), np.sort(second[:, 0]))


def test_heads_that_cannot_be_widened_are_refused(tmp_path: Path) -> None:
    # 3 heads of 96 dimensions: 288 columns, of which 512 are no whole number of heads
    change = {"llama.embedding_length": 288, "llama.attention.head_count": 3}
    source = write_gguf(tmp_path / "m.gguf", change=change, tensors={})
    with pytest.raises(ValueError, match="5 heads of 96 in groups of 1 are not 512 columns"):
        widen(source, tmp_path / "wide.gguf")
