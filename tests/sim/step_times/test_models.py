"""Model shapes: from the list, from a file, with experts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sim.step_times.models import ModelShape, known_models
from tests.sim.step_times.profiles import MODEL


def test_names_are_case_blind_and_may_lack_the_owner() -> None:
    assert ModelShape.named("LLAMA-3.1-8b").name == "meta-llama/Llama-3.1-8B"
    with pytest.raises(ConfigError, match="--model-shape FILE"):
        ModelShape.named("nothing-like-it")
    assert ModelShape.named("toy-1b", (MODEL,)) is MODEL
    bare = replace(MODEL, name="Toy-1B")
    assert ModelShape.named("anyone/Toy-1B", (bare,)) is bare
    with pytest.raises(ConfigError, match="no shape"):
        ModelShape.named("anyone/Toy-1B", (MODEL,))


def test_parameters_of_a_mixture_of_experts_are_those_published() -> None:
    shape = ModelShape.named("Qwen3-30B-A3B")
    assert shape.num_parameters == pytest.approx(30.5e9, rel=0.01)
    active = shape.num_layers * (shape.shared_parameters + 8 * shape.expert_parameters)
    assert active == pytest.approx(3.3e9 - 2 * shape.vocab_size * shape.hidden_size, rel=0.1)
    mixtral = ModelShape.named("Mixtral-8x7B-v0.1")
    assert mixtral.num_parameters == pytest.approx(46.7e9, rel=0.01)
    # half of the experts each
    halves = 2 * mixtral.parameters_per_engine(2) - mixtral.parameters_per_engine()
    assert halves == pytest.approx(
        32 * mixtral.shared_parameters + 2 * mixtral.vocab_size * mixtral.hidden_size
    )


@pytest.mark.parametrize("several", [False, True])
def test_shapes_are_read_as_they_are_listed(several: bool, tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    entry = asdict(MODEL)
    path.write_text(json.dumps([entry, asdict(replace(MODEL, name="b"))] if several else entry))
    assert ModelShape.read(path)[0] == MODEL
    assert len(ModelShape.read(path)) == (2 if several else 1)


def test_shapes_are_read_from_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "Their-MoE-4B"
    folder.mkdir()
    path = folder / "config.json"
    config = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
    path.write_text(json.dumps(config))
    (shape,) = ModelShape.read(path)
    assert (shape.name, shape.num_kv_heads, shape.head_dim) == ("Their-MoE-4B", 4, 16)
    assert (shape.num_experts, shape.experts_per_token, shape.expert_intermediate_size) == (
        8,
        2,
        96,
    )
    assert shape.tied


def test_files_that_are_no_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    with pytest.raises(ConfigError, match="cannot read model shapes"):
        ModelShape.read(path)
    path.write_text('{"name": "x", "num_layers": 3}')
    with pytest.raises(ConfigError, match="gives no hidden_size"):
        ModelShape.read(path)
    path.write_text(json.dumps(asdict(MODEL) | {"surprise": 1}))
    with pytest.raises(ConfigError, match="surprise"):
        ModelShape.read(path)
    with pytest.raises(ConfigError, match="experts_per_token from 1 to 4"):
        replace(MODEL, num_experts=4)


def test_every_listed_shape_says_where_it_is_from() -> None:
    assert all(shape.source for shape in known_models())
