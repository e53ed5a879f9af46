"""Mixtures of experts against the float64 reference, wherever the router sends rows.

``tests/backends/test_architectures.py`` holds whole architectures with experts to transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason, variants
from paceline.backends.native.packed import PackedCopies
from paceline.backends.native.single_kernels import cache_bytes
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError
from tests.backends.native.reference import (
    Weights,
    logits,
    random_weights,
    rope_tables,
    tiny_config,
)

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

EXPERTS = 6
# root mean square error over the logits' standard deviation, as of dense models (test_model.py)
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 4e-2, "q4": 0.2}


def config(per_token: int = 3, **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "num_experts": EXPERTS,
        "experts_per_token": per_token,
        # no multiple of a panel; whole groups of 32 columns, or of none
        "expert_intermediate_size": 64,
        "router_bias": True,
    }
    return tiny_config(**(values | changes))


def make(
    shape: ModelConfig, weights: Weights, dtype: str, *, isa: str | None = None, threads: int = 2
) -> NativeModel:
    model = NativeModel(
        shape, weights.items(), rope_tables(shape, 256),
        NativeSettings(dtype=dtype, num_blocks=16, isa=isa, threads=threads),
    )  # fmt: skip
    cache_bytes(model)[:] = 0xFF
    return model


def run(model: NativeModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    rows = np.arange(len(ids))
    return model.forward(ids, rows, np.array([0, len(ids)]), np.array([[3, 1, 7, 5]]), rows).copy()


def error(out: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    return float(np.sqrt(((out - expected) ** 2).mean()) / expected.std())


def prefer(weights: Weights, biases: list[float], scale: float = 1.0) -> Weights:
    """Weights whose routers have these biases, and a part of what they say of a row."""
    changed = dict(weights)
    for name in weights:
        if name.endswith("router.bias"):
            changed[name] = np.array(biases, dtype=np.float32)
        elif name.endswith("router.weight"):
            changed[name] = weights[name] * np.float32(scale)
    return changed


IDS = np.random.default_rng(2).integers(0, 150, 57)
# biases of the router: nobody is preferred; everybody goes to one and nobody to another; all to the
# same ones
ROUTES = {
    "each": [0.0] * EXPERTS,
    "one": [0.0, 100.0, 0.0, -100.0, 0.0, 0.0],
    "same": [100.0, -100.0, 99.0, -100.0, 98.0, -100.0],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("per_token", "normalise"), [(1, False), (2, True), (3, False), (6, True)])
def test_rows_go_where_the_router_sends_them(route: str, per_token: int, normalise: bool) -> None:
    shape = config(per_token, normalise_experts=normalise, mlp_bias=True, dense_layers=())
    weights = prefer(random_weights(shape, 1), ROUTES[route])
    expected = logits(shape, weights, IDS)
    for threads in (1, 3):
        model = make(shape, weights, "float32", threads=threads)
        assert error(run(model, IDS), expected) < BOUNDS["float32"]
        # one row, and few enough that most experts have none
        for count in (1, 2, 5):
            assert error(run(model, IDS[:count]), expected[:count]) < BOUNDS["float32"]


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("width", [64, 41])
def test_every_format_on_every_level(isa: str, dtype: str, width: int) -> None:
    shape = config(expert_intermediate_size=width, normalise_experts=True, dense_layers=(1,))
    # so far apart that rounding does not send a row elsewhere: that is no error of the products
    weights = prefer(random_weights(shape, 3), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0], 0.1)
    assert (
        error(run(make(shape, weights, dtype, isa=isa), IDS), logits(shape, weights, IDS))
        < (BOUNDS[dtype])
    )


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    shape = config(2)
    weights = prefer(random_weights(shape, 5), [0.0] * EXPERTS, 0.0)
    out = run(make(shape, weights, "float32"), IDS)
    # as if the first two were liked better by nothing that counts
    nearly = prefer(weights, [1e-7, 1e-7, 0.0, 0.0, 0.0, 0.0], 0.0)
    assert error(out, logits(shape, nearly, IDS)) < BOUNDS["float32"]


def test_a_router_that_says_no_number_is_noticed() -> None:
    shape = config()
    weights = prefer(random_weights(shape, 5), [float("nan")] * EXPERTS)
    model = make(shape, weights, "float32")
    run(model, IDS)
    assert (model.likeliest == -1).all()


def test_missing_and_misplaced_experts_are_named() -> None:
    shape = config(dense_layers=(1,))
    weights = random_weights(shape, 1)
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    with pytest.raises(ConfigError, match="up_proj of expert 4 of layer 0 was not loaded"):
        make(shape, {key: value for key, value in weights.items() if key != name}, "float32")
    with pytest.raises(ConfigError, match="up_proj of expert 6 is not part of this model"):
        other = name.replace("experts.4", "experts.6")
        make(shape, weights | {other: weights[name]}, "float32")
    with pytest.raises(ConfigError, match=r"up_proj has shape \[64, 95\], expected \[64, 96\]"):
        make(shape, weights | {name: weights[name][:, 1:]}, "float32")
    with pytest.raises(ConfigError, match="router is not part of a layer with one MLP"):
        router = weights["model.layers.0.mlp.router.weight"]
        make(shape, weights | {"model.layers.1.mlp.router.weight": router}, "float32")
    sinks = {"model.layers.0.self_attn.sinks.weight": np.ones(3, dtype=np.float32)}
    with pytest.raises(ConfigError, match="sinks is not part of this model"):
        make(shape, weights | sinks, "float32")


@pytest.mark.parametrize("dtype", ["q4", "float32"])
def test_a_model_starts_from_its_copy(tmp_path: Path, dtype: str) -> None:
    shape = config(attention_sinks=True, mlp_bias=True, dense_layers=(0,))
    weights = random_weights(shape, 1)
    copies = PackedCopies(tmp_path, 1 << 30, "a model")

    def start(tensors: Weights) -> NDArray[np.float32]:
        model = NativeModel(
            shape, tensors.items(), rope_tables(shape, 256),
            NativeSettings(dtype=dtype, num_blocks=8, threads=2), copies=copies,
        )  # fmt: skip
        return run(model, IDS)

    first = start(weights)
    # nothing else is read
    np.testing.assert_array_equal(start({}), first)


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_sinks_of_any_size(isa: str, kv: str) -> None:
    """A sink far below the scores is as none, one far above them takes all of the attention."""
    plain = tiny_config(attention_scale=0.05)
    shape = tiny_config(attention_scale=0.05, attention_sinks=True)
    weights = random_weights(plain, 7)
    ids = np.random.default_rng(8).integers(0, 150, 300)

    def last(config: ModelConfig, tensors: Weights, kv: str = kv) -> NDArray[np.float32]:
        model = NativeModel(
            config, tensors.items(), rope_tables(config, 300),
            NativeSettings(dtype="float32", kv_dtype=kv, num_blocks=19, isa=isa, threads=2),
        )  # fmt: skip
        cache_bytes(model)[:] = 0xFF
        starts, tables = np.array([0, 300]), np.arange(19)[None]
        # a row among many, whose parts are merged as they come, and by itself, shared out
        model.forward(ids, np.arange(300), starts, tables, np.array([299]))
        out = model.forward(
            ids[299:], np.array([299]), np.array([0, 1]), tables, np.array([0])
        ).copy()
        model.close()
        return out

    def with_sinks(value: float) -> Weights:
        sinks = np.full(3, value, dtype=np.float32)
        return weights | {f"model.layers.{i}.self_attn.sinks.weight": sinks for i in range(2)}

    none = last(plain, weights)
    np.testing.assert_array_equal(last(shape, with_sinks(-1e4)), none)
    # one of the scores' size counts alike beside every kind of cache
    some, exact = last(shape, with_sinks(6.0)), last(shape, with_sinks(6.0), "float32")
    size = np.linalg.norm(exact)
    assert np.linalg.norm(some - exact) < 0.001 * size < 0.1 * size < np.linalg.norm(some - none)
    silent = {name: w * 0 if "v_proj" in name else w for name, w in weights.items()}
    np.testing.assert_allclose(
        last(shape, with_sinks(1e4)), last(plain, silent), rtol=1e-5, atol=1e-5
    )
