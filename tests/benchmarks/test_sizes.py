"""The files of random weights that ``benchmarks.sizes`` measures with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sizes
from paceline.checkpoints.gguf import GGUFCheckpoint

TINY = sizes.Shape(2, 64, 128, 4, 2, 16, 300)
MIXTURE = replace(TINY, inner=96, experts=6, experts_per_token=2)


@pytest.mark.parametrize("shape", [TINY, MIXTURE])
def test_a_written_model_is_what_the_shape_says(tmp_path: Path, shape: sizes.Shape) -> None:
    path = tmp_path / "tiny.gguf"
    sizes.write_model(path, shape)
    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 64, 16)
    assert config.qk_norm and config.tie_word_embeddings and config.vocab_size == 300
    matrices = [n for n in checkpoint.tensor_names() if len(checkpoint.tensor_shape(n)) == 2]
    assert sum(np.prod(checkpoint.tensor_shape(name)) for name in matrices) == shape.weights
    assert (config.num_experts, config.experts_per_token) == (
        shape.experts, shape.experts_per_token,
    )  # fmt: skip
    # activations neither die nor explode, and no two matrices are alike
    values = [checkpoint.tensor(name) for name in matrices if "embed" not in name]
    for matrix in values:
        assert matrix.std() * matrix.shape[1] ** 0.5 == pytest.approx(1, abs=0.1)
    assert len({matrix.tobytes()[:64] for matrix in values}) == len(values)


def test_the_named_shapes_are_as_large_as_they_say() -> None:
    billions = {name: shape.weights / 1e9 for name, shape in sizes.SHAPES.items()}
    assert billions == pytest.approx({"0.6b": 0.6, "1.7b": 1.7, "moe": 1.5}, abs=0.03)
    read = {name: shape.weights * shape.share_read / 1e9 for name, shape in sizes.SHAPES.items()}
    assert read == pytest.approx({"0.6b": 0.6, "1.7b": 1.7, "moe": 0.46}, abs=0.03)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("SIZES", "7b", "7b not among 0.6b, 1.7b, moe"), ("ROWS", "8x", "row '8x' is neither")],
)
def test_unknown_names_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, variable: str, value: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path / "peers"))
    monkeypatch.setenv(variable, value)
    assert sizes.main() == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()
