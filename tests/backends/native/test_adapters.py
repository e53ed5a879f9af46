"""Rows with adapters: as weights with the adapter merged in, and the same alone as among others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from paceline.backends.native.adapters import NativeAdapter
from paceline.backends.runner.interface import RowAdapter
from paceline.checkpoints.model.adapter import MODULES, AdapterFile, AdapterPair, AdapterValues
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError
from tests.backends.native.reference import (
    Weights,
    levels,
    random_weights,
    rope_tables,
    tiny_config,
)
from tests.checkpoints.adapters import Pairs, random_pairs

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

LENGTH, BLOCKS = 64, 4
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    # borders of queries, keys and values lie inside halves of panels, and the width is no whole one
    "narrow": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
               "hidden_size": 40, "intermediate_size": 72},
    "norms after": {"norms_after": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
                    "residual_scale": 0.5, "activation": "gelu_tanh"},
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32,
                "dense_layers": (1,)},
}  # fmt: skip
Logits = NDArray[np.float32]


def values_of(config: ModelConfig, pairs: Pairs, scale: float = 0.5) -> AdapterValues:
    """The value that a file with these pairs is read into."""
    made = {
        key: AdapterPair(*key, ("A", "B"), (a.shape, b.shape), scale, lambda a=a, b=b: (a, b))  # type: ignore[misc]
        for key, (a, b) in pairs.items()
    }
    return AdapterFile.of(Path("made"), config, made).read()


def merged(weights: Weights, pairs: Pairs, scale: float = 0.5) -> Weights:
    """Weights that do what the adapter does."""
    result = dict(weights)
    for (layer, module), (a, b) in pairs.items():
        name = f"model.layers.{layer}.{module}.weight"
        result[name] = (weights[name] + scale * (b.astype(np.float64) @ a)).astype(np.float32)
    return result


def make_model(
    config: ModelConfig, weights: Weights, isa: str, dtype: str = "float32", threads: int = 2
) -> NativeModel:
    settings = NativeSettings(
        dtype=dtype, kv_dtype="float32", isa=isa, threads=threads, num_blocks=40 * BLOCKS
    )
    return NativeModel(config, weights.items(), rope_tables(config, LENGTH), settings)


def make_adapter(
    model: NativeModel, config: ModelConfig, pairs: Pairs, *, dtype: str = "float32"
) -> NativeAdapter:
    layers = config.num_hidden_layers
    return NativeAdapter(model.handle, layers, values_of(config, pairs), dtype=dtype)


def run(
    model: NativeModel, rows: Sequence[tuple[int, int, RowAdapter | None]], vocab: int = 150
) -> list[Logits]:
    """Logits of all tokens of each row: (first of its token ids, tokens, adapter), from position
    0 on, all in one step."""
    counts = [count for _, count, _ in rows]
    ids = [(np.arange(count) * 7 + first) % vocab for first, count, _ in rows]
    starts = np.cumsum([0, *counts])
    tables = np.arange(len(rows) * BLOCKS).reshape(-1, BLOCKS)
    adapters = [adapter for _, _, adapter in rows]
    out = model.forward(
        np.concatenate(ids), np.concatenate([np.arange(count) for count in counts]), starts, tables,
        np.arange(starts[-1]), adapters=adapters if any(adapters) else None,
    ).copy()  # fmt: skip
    return [out[a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_an_adapter_is_as_weights_with_it_merged_in(isa: str, name: str, kept: str) -> None:
    config = tiny_config(**SHAPES[name])
    weights, pairs = random_weights(config, 5), random_pairs(config, rank=5)
    model = make_model(config, weights, isa)
    wanted = run(make_model(config, merged(weights, pairs), isa), [(3, 41, None)])[0]
    adapter = RowAdapter(make_adapter(model, config, pairs, dtype=kept), 1.0)
    (got,), (base,) = run(model, [(3, 41, adapter)]), run(model, [(3, 41, None)])
    scale = np.abs(wanted).max()
    # the values of the adapter are such that bfloat16 holds them; of a rank's one scale is the
    # 127th part of the largest
    bound = 0.1 if kept == "int8" else 1e-5
    assert np.abs(got - wanted).max() < bound * max(1.0, scale)
    assert np.abs(base - wanted).max() > 1e-2 * scale


@pytest.mark.parametrize("isa", levels())
def test_any_part_of_an_adapter_may_be_missing(isa: str) -> None:
    """One module alone, and modules of different ranks in one product."""
    config = tiny_config(**SHAPES["narrow"])
    weights = random_weights(config, 5)
    model = make_model(config, weights, isa)
    cases = [random_pairs(config, 3, modules=[module]) for module in MODULES]
    cases += [random_pairs(config, 3, modules=MODULES[::2])]
    mixed: Pairs = {}
    for rank, module in enumerate(MODULES, 2):
        mixed |= random_pairs(config, 3 * rank, modules=[module])
    for pairs in [*cases, mixed]:
        wanted = run(make_model(config, merged(weights, pairs), isa), [(3, 20, None)])[0]
        adapter = RowAdapter(make_adapter(model, config, pairs), 1.0)
        (got,) = run(model, [(3, 20, adapter)])
        assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max(), set(pairs)


@cache
def _ranks() -> tuple[Pairs, ...]:
    config = tiny_config()
    return tuple(random_pairs(config, rank, seed=rank) for rank in (1, 8, 64))


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_row_is_the_same_alone_and_among_others(isa: str, dtype: str, kept: str) -> None:
    """Base, ranks 1, 8 and 64, one adapter twice, another scale and a long prompt in one step."""
    config = tiny_config()
    model = make_model(config, random_weights(config, 5), isa, dtype)
    one, eight, many = (
        RowAdapter(make_adapter(model, config, pairs, dtype=kept), 1.0) for pairs in _ranks()
    )
    half = eight._replace(scale=0.5)
    rows = [
        (1, 1, None), (2, 1, one), (3, 1, eight), (4, 1, many), (5, 1, eight), (6, 40, many),
        (7, 1, half), (8, 3, None), (9, 1, eight._replace(scale=0.0)),
    ]  # fmt: skip
    together = run(model, [*rows, *((20 + i, 1, eight) for i in range(20))])
    for row, got in zip(rows, together, strict=False):
        (alone,) = run(model, [row])
        assert np.array_equal(got, alone), row[:2]
    untouched = make_model(config, random_weights(config, 5), isa, dtype)
    for index in (0, 7, 8):
        (wanted,) = run(untouched, [(*rows[index][:2], None)])
        assert np.array_equal(together[index], wanted)
    assert not np.array_equal(together[2], run(untouched, [(3, 1, None)])[0])
    assert not np.array_equal(together[6], run(model, [(7, 1, eight)])[0])


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(dtype, "bfloat16") for dtype in ("bfloat16", "int8", "q4")]
    # next to weights in bfloat16 bytes err 2.3 times as much as those do, and are refused
    + [(dtype, "int8") for dtype in ("int8", "q4")],
)
def test_rounded_weights_err_no_more_with_an_adapter(isa: str, dtype: str, kept: str) -> None:
    config = tiny_config()
    weights, pairs = random_weights(config, 5), random_pairs(config, 16)
    exact = make_model(config, merged(weights, pairs), isa)
    plain = make_model(config, weights, isa)
    model = make_model(config, weights, isa, dtype)
    adapter = RowAdapter(make_adapter(model, config, pairs, dtype=kept), 1.0)
    rows = [(first, 30, None) for first in range(4)]

    def error(got: list[Logits], wanted: list[Logits]) -> float:
        found = np.concatenate(got) - np.concatenate(wanted)
        return float(np.sqrt((found**2).mean() / (np.concatenate(wanted) ** 2).mean()))

    base = error(run(model, rows), run(plain, rows))
    adapted = error(run(model, [(*row[:2], adapter) for row in rows]), run(exact, rows))
    assert adapted < 1.5 * base


def test_memory_goes_with_the_adapter_and_outlives_nothing() -> None:
    config = tiny_config()
    model = make_model(config, random_weights(config, 5), levels()[0])
    pairs = random_pairs(config, 8)
    narrow = make_adapter(model, config, pairs, dtype="bfloat16")
    values = sum(a.size + b.size for a, b in pairs.values())
    assert 2 * values <= narrow.num_bytes < 3 * values + 8192
    assert (
        make_adapter(model, config, pairs, dtype="int8").num_bytes <= narrow.num_bytes // 2 + 4096
    )
    narrow.close()
    with pytest.raises(ConfigError, match="closed"):
        run(model, [(1, 1, RowAdapter(narrow, 1.0))])


def test_what_a_model_lacks_is_refused() -> None:
    config = tiny_config(**SHAPES["experts"])
    model = make_model(config, random_weights(config, 5), levels()[0])
    dense = dataclasses.replace(config, dense_layers=(0, 1))
    with pytest.raises(ConfigError, match="layer 0 has no matrix 4"):
        make_adapter(model, dense, random_pairs(dense))
    small = tiny_config(num_hidden_layers=1)
    other = make_model(small, random_weights(small, 5), levels()[0])
    adapter = make_adapter(other, small, random_pairs(small))
    with pytest.raises(ConfigError, match="a model of 1 layers"):
        run(model, [(1, 1, RowAdapter(adapter, 1.0))])
