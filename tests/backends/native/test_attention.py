"""Paged attention against float64: ragged batches, all block fillings, poisoned memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason, variants
from paceline.backends.native.library import limits
from paceline.backends.native.single_kernels import attend, cache_bytes
from tests.backends.native import reference
from tests.backends.native.reference import random_weights, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

BLOCKS = 96
# root mean square error over the outputs' root mean square, of the worst sequence
BOUNDS = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 3e-2}


class Harness:
    """A one-layer model whose rotation does nothing, its cache full of NaN, and a float64 copy of
    every sequence's keys and values."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
        *,
        block_size: int = 16,
        threads: int = 2,
        isa: str | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        config = tiny_config(
            num_hidden_layers=1,
            vocab_size=8,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            sliding_window=window,
            sliding_layers=() if window is None else (0,),
            attention_softcap=softcap,
        )
        still = np.ones((4096, head_dim // 2), dtype=np.float32)
        self.model = NativeModel(
            config,
            random_weights(config, 0).items(),
            (still, still * 0),
            NativeSettings(
                dtype="float32",
                kv_dtype=kv_dtype,
                num_blocks=BLOCKS,
                block_size=block_size,
                threads=threads,
                isa=isa,
            ),
        )
        # a NaN in float32 and bfloat16; int8 values cannot be NaN, their scales can
        cache_bytes(self.model)[:] = 0xFF
        self.shape = (heads, kv_heads, head_dim)
        self.window, self.softcap = window, softcap
        self.block_size = block_size
        self.random = np.random.default_rng(heads * 1000 + head_dim)
        self.free = list(self.random.permutation(BLOCKS))
        self.tables: list[list[int]] = []
        self.past: list[NDArray[np.float64]] = []

    def add(self, sequences: int) -> None:
        self.tables += [[] for _ in range(sequences)]
        width = (self.shape[0] + 2 * self.shape[1]) * self.shape[2]
        self.past += [np.empty((0, width)) for _ in range(sequences)]

    def step(self, counts: list[int]) -> float:
        """Append ``counts[i]`` random tokens to sequence i; the worst sequence's error."""
        heads, kv_heads, head_dim = self.shape
        positions, starts = [], [0]
        for index, count in enumerate(counts):
            begin = len(self.past[index])
            positions += range(begin, begin + count)
            starts.append(starts[-1] + count)
            fresh = self.random.normal(0, 1, (count, self.past[index].shape[1]))
            fresh[:, : heads * head_dim] *= 2
            self.past[index] = np.concatenate([self.past[index], fresh.astype(np.float32)])
            while len(self.tables[index]) * self.block_size < len(self.past[index]):
                self.tables[index].append(int(self.free.pop()))
        width = max(1, max(len(table) for table in self.tables))
        # entries behind a sequence's last block mean nothing
        tables = np.array([table + [-7] * (width - len(table)) for table in self.tables])
        qkv = [past[len(past) - count :] for past, count in zip(self.past, counts, strict=True)]
        out = attend(
            self.model,
            np.concatenate(qkv).astype(np.float32),
            np.array(positions),
            np.array(starts),
            tables,
        )
        worst = 0.0
        for index, count in enumerate(counts):
            if count == 0:
                continue
            past = self.past[index].reshape(len(self.past[index]), -1, head_dim)
            expected = reference.attend(
                past[-count:, :heads],
                past[:, heads : heads + kv_heads],
                past[:, heads + kv_heads :],
                self.window,
                self.softcap,
            )
            error = np.abs(out[starts[index] : starts[index + 1]] - expected)
            assert np.isfinite(error).all()
            worst = max(worst, float(np.sqrt((error**2).mean() / (expected**2).mean())))
        return worst

    def spoils(self) -> bool:
        """Whether a token after what the only sequence has makes numbers that are none."""
        heads, kv_heads, head_dim = self.shape
        qkv = np.ones((1, (heads + 2 * kv_heads) * head_dim), dtype=np.float32)
        place, starts = np.array([len(self.past[0])]), np.array([0, 1])
        return not np.isfinite(attend(self.model, qkv, place, starts, np.array(self.tables))).all()


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_ragged_batches(isa: str, kv_dtype: str, group: int, head_dim: int) -> None:
    harness = Harness(2 * group, 2, head_dim, kv_dtype, isa=isa)
    harness.add(5)
    for counts in ([1, 17, 40, 0, 5], [1, 1, 1, 3, 1], [1, 1, 29, 16, 0]):
        assert harness.step(counts) < BOUNDS[kv_dtype]
    harness.model.close()


@settings(max_examples=40)
@given(
    isa=st.sampled_from(variants() or ("",)),
    kv_dtype=st.sampled_from(sorted(BOUNDS)),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 10).map(lambda tiles: 16 * tiles),
    block_size=st.sampled_from([16, 32, 48]),
    threads=st.integers(1, 3),
    window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.floats(0.5, 50),
    steps=st.lists(
        st.lists(st.integers(0, 45), min_size=3, max_size=3).filter(any), min_size=1, max_size=4
    ),
)
def test_random_shapes_and_lengths(
    isa: str,
    kv_dtype: str,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    threads: int,
    window: int | None,
    softcap: float | None,
    steps: list[list[int]],
) -> None:
    harness = Harness(
        kv_heads * group,
        kv_heads,
        head_dim,
        kv_dtype,
        block_size=block_size,
        threads=threads,
        isa=isa,
        window=window,
        softcap=softcap,
    )
    harness.add(3)
    for counts in steps:
        assert harness.step(counts) < BOUNDS[kv_dtype]
    harness.model.close()


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_all_block_fillings(kv_dtype: str, block_size: int) -> None:
    """One token at a time and all at once, for every length up to three blocks and one."""
    harness = Harness(3, 1, 64, kv_dtype, block_size=block_size)
    harness.add(1)
    for _ in range(3 * block_size + 1):
        assert harness.step([1]) < BOUNDS[kv_dtype]
    for length in range(1, 3 * block_size + 2):
        whole = Harness(3, 1, 64, kv_dtype, block_size=block_size, threads=1)
        whole.add(1)
        assert whole.step([length]) < BOUNDS[kv_dtype]
        whole.model.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_long_context_is_split_over_threads(threads: int, kv_dtype: str) -> None:
    harness = Harness(4, 1, 64, kv_dtype, threads=threads)
    harness.add(1)
    for counts in ([1100], [1], [1], [3]):
        assert harness.step(counts) < BOUNDS[kv_dtype]


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("window", [1, 15, 16, 40, 300])
def test_sliding_window(isa: str, kv_dtype: str, window: int) -> None:
    harness = Harness(4, 2, 64, kv_dtype, isa=isa, window=window)
    harness.add(2)
    for counts in ([70, 3], [1, 1], [20, 300], [1, 1]):
        assert harness.step(counts) < BOUNDS[kv_dtype]


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [0.7, 3.0, 50.0])
def test_soft_capped_scores(isa: str, kv_dtype: str, window: int | None, softcap: float) -> None:
    """Rows alone and together, over several parts of keys, in memory that was poisoned."""
    harness = Harness(8, 2, 64, kv_dtype, isa=isa, window=window, softcap=softcap)
    harness.add(3)
    for counts in ([70, 3, 270], [1, 1, 1], [20, 30, 2]):
        assert harness.step(counts) < BOUNDS[kv_dtype]
    # scores have a deviation of 2: without the cap the outputs are others
    harness.softcap = None
    worst = harness.step([1, 1, 1])
    assert worst > BOUNDS[kv_dtype] or softcap == 50.0


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_queries_of_zeros_beside_a_soft_cap(isa: str, kv_dtype: str) -> None:
    """Their scale is zero where they are bytes: all that is visible counts alike."""
    harness = Harness(4, 2, 64, kv_dtype, isa=isa, softcap=5.0)
    past = harness.random.normal(0, 1, (40, 8 * 64)).astype(np.float32)
    past[:, : 4 * 64] = 0
    places, starts = np.arange(40), np.array([0, 40])
    out = attend(harness.model, past, places, starts, np.array([[3, 9, 4]]))
    means = past[:, 6 * 64 :].cumsum(0) / np.arange(1, 41)[:, None]
    expected = np.repeat(means.reshape(40, 2, 64), 2, axis=1).reshape(40, -1)
    assert np.sqrt(((out - expected) ** 2).mean()) < BOUNDS[kv_dtype]


@pytest.mark.parametrize("isa", variants())
# whose bytes can be none; int8 begins at the same tiles
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [16, 40])
def test_keys_before_a_window_are_read_as_far_as_the_library_says(
    isa: str, kv_dtype: str, window: int
) -> None:
    """At every position: with NaN in all blocks before that nothing changes, and at some position
    one block more is missed."""
    harness = Harness(4, 2, 64, kv_dtype, isa=isa, window=window)
    harness.add(1)
    harness.step([100])
    tables, missed = harness.tables[0], 0
    cache = cache_bytes(harness.model).reshape(BLOCKS, -1)
    for position in range(100, 180):
        first = max(0, position - window + 1 - limits().keys_before_window) // 16
        for block in tables[:first]:
            cache[block] = 0xFF
        assert harness.step([1]) < BOUNDS[kv_dtype], position
        held = cache[tables[first]].copy()
        cache[tables[first]] = 0xFF
        harness.past[0] = harness.past[0][:-1]
        missed += harness.spoils()
        cache[tables[first]] = held
        harness.step([1])
    assert missed


@pytest.mark.parametrize("isa", variants())
@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_the_smallest_and_the_largest_heads(isa: str, kv_dtype: str, head_dim: int) -> None:
    harness = Harness(4, 2, head_dim, kv_dtype, isa=isa)
    harness.add(2)
    for counts in ([37, 5], [1, 1]):
        assert harness.step(counts) < BOUNDS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_large_scores_do_not_overflow(kv_dtype: str) -> None:
    harness = Harness(2, 2, 64, kv_dtype)
    harness.add(1)
    past = harness.random.normal(0, 1, (60, 6 * 64))
    past[:, : 4 * 64] *= 30
    harness.past[0] = past.astype(np.float32).astype(np.float64)
    harness.tables[0] = [3, 9, 4, 8]
    out = attend(
        harness.model,
        past.astype(np.float32),
        np.arange(60),
        np.array([0, 60]),
        np.array(harness.tables),
    )
    assert np.isfinite(out).all()
    assert np.abs(out).max() < np.abs(past[:, 4 * 64 :]).max() * 1.02
