"""Whole models against the float64 reference."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import (
    NativeModel,
    NativeSettings,
    library,
    unavailable_reason,
    unsupported_reason,
    variants,
)
from paceline.backends.native.sampling import token_logprobs
from paceline.backends.native.single_kernels import cache_bytes
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError, ConfigError
from tests.backends.native.reference import (
    Weights,
    levels,
    logits,
    random_weights,
    rope_tables,
    tiny_config,
)

native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

# root mean square error over the logits' standard deviation
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 4e-2, "q4": 0.2}
FAMILIES = {
    "llama": tiny_config(),
    "biases": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen3": tiny_config(
        model_type="qwen3",
        qk_norm=True,
        tie_word_embeddings=False,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
    ),
    "sliding": tiny_config(sliding_window=20, sliding_layers=(1,)),
    "capped": tiny_config(attention_softcap=0.8, logits_softcap=12.0),
    # nothing a multiple of a panel or a group
    "odd": tiny_config(hidden_size=90, intermediate_size=150, vocab_size=151, head_dim=16),
}


def _make(config: ModelConfig, weights: Weights, dtype: str, **options: object) -> NativeModel:
    values: dict[str, object] = {"num_blocks": 16, "threads": 2}
    return NativeModel(
        config,
        weights.items(),
        rope_tables(config, 256),
        NativeSettings(dtype=dtype, **(values | options)),  # type: ignore[arg-type]
    )


def _whole(model: NativeModel, ids: NDArray[np.int64], blocks: list[int]) -> NDArray[np.float32]:
    count = len(ids)
    rows = np.arange(count)
    return model.forward(ids, rows, np.array([0, count]), np.array([blocks]), rows).copy()


def _error(out: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    return float(np.sqrt(((out - expected) ** 2).mean()) / expected.std())


@native
@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(isa: str, dtype: str, family: str) -> None:
    config = FAMILIES[family]
    weights = random_weights(config, 1)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 57)
    model = _make(config, weights, dtype, isa=isa)
    cache_bytes(model)[:] = 0xFF
    assert _error(_whole(model, ids, [3, 1, 7, 5]), logits(config, weights, ids)) < BOUNDS[dtype]


@native
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_cache_formats(dtype: str, kv_dtype: str) -> None:
    config = FAMILIES["llama"]
    weights = random_weights(config, 3)
    ids = np.random.default_rng(4).integers(0, config.vocab_size, 40)
    model = _make(config, weights, dtype, kv_dtype=kv_dtype)
    bound = max(BOUNDS[dtype], {"float32": 0, "bfloat16": 1e-2, "int8": 1.5e-2}[kv_dtype])
    assert _error(_whole(model, ids, [0, 2, 4]), logits(config, weights, ids)) < bound


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("cuts", [(1, 17, 18, 50), (16, 32, 48), tuple(range(1, 57))])
def test_chunks_equal_the_whole(dtype: str, cuts: tuple[int, ...]) -> None:
    config = FAMILIES["llama"]
    weights = random_weights(config, 5)
    ids = np.random.default_rng(6).integers(0, config.vocab_size, 57)
    model = _make(config, weights, dtype, kv_dtype="float32")
    whole = _whole(model, ids, [3, 1, 7, 5])
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, 57), strict=True):
        rows = np.arange(end - begin)
        parts.append(
            model.forward(
                ids[begin:end],
                np.arange(begin, end),
                np.array([0, end - begin]),
                np.array([[2, 0, 4, 6]]),
                rows,
            ).copy()
        )
    # the tiling of rows depends on the chunk, and with it the order of sums
    assert _error(np.concatenate(parts), whole.astype(np.float64)) < BOUNDS[dtype] / 3


@native
@pytest.mark.parametrize("dtype", ["float32", "int8", "q4"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_mixed_batch_and_sampled_rows(dtype: str, threads: int) -> None:
    """Prompts, a chunk that samples nothing, and single tokens share a step."""
    config = FAMILIES["biases"]
    weights = random_weights(config, 7)
    random = np.random.default_rng(8)
    texts = [random.integers(0, config.vocab_size, n) for n in (33, 20, 9, 41)]
    model = _make(config, weights, dtype, threads=threads, num_blocks=24)
    cache_bytes(model)[:] = 0xFF
    tables = np.array([[0, 1, 2], [8, 7, -1], [20, -1, -1], [11, 5, 6]])
    done = [0, 0, 0, 0]
    seen: list[list[NDArray[np.float32]]] = [[], [], [], []]
    for counts in ([20, 20, 0, 0], [13, 0, 8, 40], [0, 0, 1, 1]):
        ids = np.concatenate(
            [text[at : at + n] for text, at, n in zip(texts, done, counts, strict=True)]
        )
        places = np.concatenate([np.arange(at, at + n) for at, n in zip(done, counts, strict=True)])
        starts = np.cumsum([0, *counts])
        done = [at + n for at, n in zip(done, counts, strict=True)]
        ends = [i for i in range(4) if counts[i] and done[i] == len(texts[i])]
        out = model.forward(ids, places, starts, tables, starts[1:][ends] - 1)
        assert out.shape == (len(ends), config.vocab_size)
        for row, i in zip(out, ends, strict=True):
            seen[i].append(row.copy())
    for text, rows in zip(texts, seen, strict=True):
        expected = logits(config, weights, text)[-1]
        assert len(rows) == 1
        assert _error(rows[0], expected) < BOUNDS[dtype]


@native
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [11, 12, 27, 45])
def test_members_with_rows_of_their_own(dtype: str, rows: int) -> None:
    """Enough rows for each of two or three members to take some through whole layers by itself; in
    the last step fewer are sampled than computed."""
    config = FAMILIES["biases"]
    weights = random_weights(config, 11)
    texts = np.random.default_rng(12).integers(0, config.vocab_size, (rows, 6))
    results = []
    for threads in (1, 2, 3):
        model = _make(config, weights, dtype, threads=threads, num_blocks=rows)
        cache_bytes(model)[:] = 0xFF
        tables = np.arange(rows)[::-1, None]
        starts = np.arange(rows + 1)
        sampled = np.arange(0, rows, 3)
        model.forward(
            texts[:, :5].ravel(), np.tile(np.arange(5), rows), 5 * starts, tables, starts[:0]
        )
        out = model.forward(texts[:, 5], np.full(rows, 5), starts, tables, sampled)
        np.testing.assert_array_equal(model.likeliest, out.argmax(-1))
        results.append(out.copy())
        for place, row in zip(sampled[:3], out, strict=False):
            assert _error(row, logits(config, weights, texts[place])[-1]) < BOUNDS[dtype]
    for other in results[1:]:
        assert _error(other, results[0].astype(np.float64)) < BOUNDS[dtype] / 3


@native
@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_sequence_does_not_depend_on_those_beside_it(isa: str, dtype: str, kv_dtype: str) -> None:
    config = FAMILIES["llama"]
    random = np.random.default_rng(9)
    most, length = 30, 20
    model = _make(
        config, random_weights(config, 9), dtype, isa=isa, kv_dtype=kv_dtype, num_blocks=2 * most
    )
    ids = random.integers(0, config.vocab_size, (most, length + 1))
    tables = random.permutation(2 * most).reshape(most, 2)
    for row in range(most):
        _whole(model, ids[row, :length], list(tables[row]))
    alone: NDArray[np.float32] | None = None
    # 13 and more are dealt to the members of the team, who compute with tiles of all heights
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 23, most):
        got = model.forward(
            ids[:rows, length],
            np.full(rows, length),
            np.arange(rows + 1),
            tables[:rows],
            np.arange(rows),
        )
        alone = got[:1].copy() if alone is None else alone
        np.testing.assert_array_equal(got[:1], alone)


@native
@pytest.mark.parametrize("isa", levels())
def test_weights_of_four_bits_take_the_memory_of_five(isa: str) -> None:
    config = tiny_config(hidden_size=768, intermediate_size=3072, num_hidden_layers=3)
    weights = random_weights(config, 1)
    # with a scale and a minimum in 16 bits for each 32, and 32 bits a row; the head is int8 with
    # those 32 bits too
    layers = sum(w.size * 5 / 8 + 4 * len(w) for name, w in weights.items() if "proj" in name)
    head = sum(w.size + 4 * len(w) for name, w in weights.items() if "embed" in name)
    taken = _make(config, weights, "q4", isa=isa).weight_bytes
    assert layers + head <= taken <= 1.01 * (layers + head)


@native
@pytest.mark.parametrize("isa", levels())
def test_likeliest_is_the_first_of_the_largest(isa: str) -> None:
    config = tiny_config(vocab_size=700, tie_word_embeddings=False)
    weights = random_weights(config, 13)
    head = weights["lm_head.weight"]
    # rows alike have logits alike: ties
    head[400:] = head[:300]
    ids = np.random.default_rng(14).integers(0, 700, 40)
    model = _make(config, weights, "float32", isa=isa)
    out = _whole(model, ids, [0, 1, 2])
    assert model.likeliest.tolist() == out.argmax(-1).tolist()
    assert max(model.likeliest) < 400
    for wrong in (np.nan, np.inf):
        head[699] = wrong
        model = _make(config, weights, "float32", isa=isa)
        _whole(model, ids, [0, 1, 2])
        assert model.likeliest.tolist() == [-1] * 40


@native
@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("softcap", [1e-6, 0.01, 30.0, 1e6])
def test_soft_capped_logits(isa: str, softcap: float) -> None:
    """Each is the function of what it is without a cap: far below the cap, bent, at it."""
    config = FAMILIES["llama"]
    weights = random_weights(config, 13)
    # rows of the tied head, from tiny to far above
    weights["model.embed_tokens.weight"] *= np.logspace(-4, 3, 150, dtype=np.float32)[:, None]
    ids = np.random.default_rng(14).integers(0, 150, 40)
    plain = _whole(_make(config, weights, "float32", isa=isa), ids, [3, 1, 7]).astype(np.float64)
    model = _make(replace(config, logits_softcap=softcap), weights, "float32", isa=isa)
    found = _whole(model, ids, [3, 1, 7])
    np.testing.assert_allclose(found, softcap * np.tanh(plain / softcap), rtol=5e-7)
    np.testing.assert_array_equal(model.likeliest, found.argmax(-1))
    assert softcap > 30 or (np.abs(found) == np.float32(softcap)).any()


@native
@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_soft_cap_hides_no_fault(isa: str, value: float) -> None:
    config = tiny_config(logits_softcap=5.0, tie_word_embeddings=False)
    weights = random_weights(config, 1)
    weights["lm_head.weight"][77, 5] = value
    model = _make(config, weights, "float32", isa=isa)
    _whole(model, np.arange(40), [0, 1, 2])
    assert model.likeliest.tolist() == [-1] * 40


@native
def test_samplers_are_given_capped_logits() -> None:
    config = FAMILIES["capped"]
    weights = random_weights(config, 15)
    ids = np.random.default_rng(16).integers(0, config.vocab_size, 20)
    model = _make(config, weights, "float32")
    out = _whole(model, ids, [3, 1])
    expected = logits(config, weights, ids)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    drawn = out.argmax(-1).tolist()
    found = token_logprobs(out, drawn, [0] * len(ids), model)
    best = [entry.logprob for entry in found]
    np.testing.assert_allclose(best, expected[np.arange(20), drawn], atol=1e-4)
    # without caps the likeliest token is nearly certain
    assert np.mean(best) < -0.5


@native
def test_copied_blocks_serve_another_sequence() -> None:
    config = FAMILIES["llama"]
    weights = random_weights(config, 9)
    ids = np.random.default_rng(10).integers(0, config.vocab_size, 33)
    model = _make(config, weights, "float32")
    whole = _whole(model, ids, [3, 1, 7])
    # the second pair copies what the first wrote
    model.copy_blocks([(3, 10), (10, 11), (1, 12)])
    last = model.forward(
        ids[32:], np.array([32]), np.array([0, 1]), np.array([[11, 12, 13]]), np.array([0])
    )
    np.testing.assert_allclose(last[0], whole[32], atol=1e-3)
    with pytest.raises(ConfigError, match="16"):
        model.copy_blocks([(0, 16)])


@native
def test_a_step_takes_no_memory_that_an_earlier_one_took() -> None:
    """Logits of 40 rows are 80 kB; what a step takes anew are index arrays of a few bytes a row."""
    config = tiny_config(vocab_size=500)
    model = _make(config, random_weights(config, 1), "float32")
    ids = np.random.default_rng(2).integers(0, 500, 40)
    _whole(model, ids, [3, 1, 7])
    rows = np.arange(40)
    tracemalloc.start()
    try:
        first = model.forward(ids, rows, np.array([0, 40]), np.array([[3, 1, 7]]), rows)
        again = model.forward(ids, rows, np.array([0, 40]), np.array([[3, 1, 7]]), rows[:30])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.shares_memory(first, again)
    assert most < 40_000


@native
def test_empty_step() -> None:
    model = _make(FAMILIES["llama"], random_weights(FAMILIES["llama"], 1), "float32")
    none = np.empty(0, dtype=np.int32)
    assert model.forward(none, none, np.array([0]), none.reshape(0, 1), none).shape == (0, 150)


@native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [150]}, "token_ids.*150"),
        ({"ids": [-1]}, "token_ids"),
        ({"positions": [256]}, "positions.*256"),
        ({"tables": [[16]]}, "block_tables.*16"),
        ({"tables": [[-1]]}, "block_tables"),
        ({"positions": [16]}, "table of 1"),
        ({"rows": [1]}, "sample_rows"),
        ({"starts": [0, 2]}, "query_start"),
        ({"ids": [1, 2], "positions": [0, 2], "starts": [0, 2]}, "consecutive"),
        ({"ids": [1, 2]}, "do not go together"),
    ],
)
def test_bad_steps_are_refused(change: dict[str, list[int]], message: str) -> None:
    model = _make(FAMILIES["llama"], random_weights(FAMILIES["llama"], 1), "float32")
    step: dict[str, list[int] | list[list[int]]] = {
        "ids": [1], "positions": [0], "starts": [0, 1], "tables": [[0]], "rows": [0]
    }  # fmt: skip
    step |= change  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        model.forward(*(np.array(value) for value in step.values()))


@native
def test_missing_and_misshapen_tensors_are_named() -> None:
    config = FAMILIES["llama"]
    weights = random_weights(config, 1)
    without = {name: w for name, w in weights.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ConfigError, match="up_proj of layer 1"):
        _make(config, without, "float32")
    with pytest.raises(ConfigError, match=r"up_proj.*\[160, 95\].*\[160, 96\]"):
        _make(
            config,
            weights | {"model.layers.0.mlp.up_proj.weight": np.zeros((160, 95), np.float32)},
            "float32",
        )
    with pytest.raises(CheckpointError, match="extra"):
        _make(config, weights | {"model.extra.weight": np.zeros((2, 2), np.float32)}, "float32")


@native
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"threads": 0}, "threads.*0"),
        ({"threads": 100_000}, "threads.*100000"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"dtype": "int4"}, "float32, bfloat16, int8, q4"),
        ({"kv_dtype": "float16"}, "float16"),
        ({"block_size": 24}, "block_size=24"),
    ],
)
def test_bad_options_are_refused(option: dict[str, object], message: str) -> None:
    config = FAMILIES["llama"]
    options: dict[str, object] = {"dtype": "float32"} | option
    with pytest.raises(ConfigError, match=message):
        _make(config, random_weights(config, 1), **options)  # type: ignore[arg-type]


@native
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_a_head_has_hidden_states(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = random_weights(config, 1)
    whole = _make(config, weights, "int8")
    tensors = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    model = _make(config, tensors, "int8", has_head=False)
    ids, rows = np.arange(9), np.arange(9)
    step = (ids, rows, np.array([0, 9]), np.array([[0]]), rows)
    np.testing.assert_array_equal(model.hidden(*step), whole.hidden(*step))
    # of two tables one is left
    table = -(-config.vocab_size // 32) * 32 * (-(-config.hidden_size // 4) * 4 + 4)
    assert whole.weight_bytes - model.weight_bytes == (0 if tied else table)
    with pytest.raises(ConfigError, match="this model has no head"):
        model.forward(*step)


@native
def test_closed_model_says_so() -> None:
    model = _make(FAMILIES["llama"], random_weights(FAMILIES["llama"], 1), "float32")
    model.close()
    model.close()
    with pytest.raises(ConfigError, match="closed"):
        model.copy_blocks([(0, 1)])


@native
def test_two_models_in_one_process() -> None:
    first, second = FAMILIES["llama"], FAMILIES["qwen3"]
    ids = np.random.default_rng(11).integers(0, 150, 20)
    made = [
        (config, weights, _make(config, weights, "float32", block_size=size))
        for config, size in ((first, 16), (second, 32))
        for weights in [random_weights(config, 12)]
    ]
    for config, weights, model in made * 2:
        assert _error(_whole(model, ids, [4, 2]), logits(config, weights, ids)) < 1e-5


def test_unsupported_shapes_have_reasons() -> None:
    assert unsupported_reason(tiny_config(), 16) is None
    assert "head_dim=24" in str(unsupported_reason(tiny_config(head_dim=24), 16))
    for name in ("attention_softcap", "logits_softcap"):
        assert unsupported_reason(tiny_config(**{name: 1e6}), 16) is None
        reason = str(unsupported_reason(tiny_config(**{name: 1e7}), 16))
        assert reason == "a soft cap of 1e+07 is not from 1e-06 to 1e+06"
    assert "block_size=8" in str(unsupported_reason(tiny_config(), 8))


def test_without_a_library_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_PATH", tmp_path / "_lib.so")
    library._load.cache_clear()
    try:
        assert "was not built" in str(unavailable_reason())
        assert variants() == ()
        with pytest.raises(ConfigError, match="was not built"):
            _make(FAMILIES["llama"], {}, "float32")
    finally:
        library._load.cache_clear()
