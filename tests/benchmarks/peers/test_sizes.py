"""The files of random weights that ``benchmarks.peers.sizes`` measures with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.setup import Places
from benchmarks.peers import sizes
from benchmarks.peers.levels import LEVELS
from paceline.checkpoints.gguf.checkpoint import open_gguf

TINY = sizes.Shape(2, 64, 128, 4, 2, 16, 300)
MIXTURE = replace(TINY, inner=96, experts=6, experts_per_token=2)


@pytest.mark.parametrize("shape", [TINY, MIXTURE])
def test_a_written_model_is_what_the_shape_says(tmp_path: Path, shape: sizes.Shape) -> None:
    path = tmp_path / "tiny.gguf"
    sizes.write_model(path, shape)
    checkpoint = open_gguf(path)
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
    [
        ("SIZES", "7b", "7b not among 0.6b, 1.7b, moe"),
        ("ROWS", "8x", "row '8x' is neither"),
        ("KINDS", "Q4_0,Q3_K", "Q3_K not among Q4_0, Q4_K_M"),
        ("ROUNDS", "0", "ROUNDS=0 is not a number from 1 to 99"),
        ("LEVEL", "mmx", "LEVEL=mmx does not run here"),
    ],
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


def test_what_the_environment_asks_for() -> None:
    usual = sizes.Wanted.of({}, ("avx2",))
    assert usual == sizes.Wanted(tuple(sizes.SHAPES), sizes.ROWS, tuple(sizes.FORMATS), 3, None)
    quick = sizes.Wanted.of({"QUICK": "1", "MEMORY": "1"}, ("avx2",))
    assert (quick.sizes, quick.rows, quick.rounds) == (("0.6b",), (), 1)
    chosen = {"KINDS": "Q4_0, Q4_0 native", "LEVEL": "avx2", "ROWS": "1x1x128", "ROUNDS": "2"}
    wanted = sizes.Wanted.of(chosen, ("avx512", "avx2"))
    assert wanted.kinds == ("Q4_0", "Q4_0 native") and wanted.level == LEVELS["avx2"]
    assert (wanted.rows, wanted.rounds) == (("1x1x128",), 2)


def test_both_engines_get_the_kinds_and_the_level_that_are_wanted(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "m.gguf", (0, 1))
    kinds = sizes._Kinds(places, ("Q4_0", "Q4_0 native"))
    ours, theirs = sizes._Ours(places, kinds), sizes._Theirs(places, kinds, LEVELS["avx2"])
    assert ours.variants == ("Q4_0", "Q4_0 native") and theirs.variants == ("Q4_0", "Q4_0@2048")
    assert "native/int8" in ours.worker("Q4_0 native", prefix_caching=False).argv
    for variant, pieces in zip(theirs.variants, ("512", "2048"), strict=True):
        argv = theirs.worker(variant, prefix_caching=False).argv
        assert argv[-4:] == (str(tmp_path / "m.Q4_0.gguf"), "Q4_0", pieces, "2")
    assert theirs.quantiser.parts[-3:] == ("build-avx2", "bin", "llama-quantize")
    assert sizes._Theirs(places, kinds, None).quantiser.parts[-3] == "build"
