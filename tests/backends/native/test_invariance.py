"""The promises of docs/understand/accuracy.md about one request's logits.

They are the same bit for bit alone and among others, from a whole prompt, from chunks of it, from
decoding, and in other blocks. What differs here is the step: how many rows it has, which tokens of
the request are among them, how many threads compute it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from paceline.backends.native.single_kernels import cache_bytes
from paceline.checkpoints.model.config import ModelConfig
from tests.backends.native.reference import levels, random_weights, rope_tables, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

LENGTH = 601  # three parts of attention (kPartKeys in csrc/kernels.h), the last not whole
BLOCKS = -(-LENGTH // 16)
OTHERS = 63
Logits = NDArray[np.float32]
CONFIGS = {
    "llama": tiny_config(max_position_embeddings=1024),
    # a window that begins inside a part, a chunk and a tile
    "sliding": tiny_config(max_position_embeddings=1024, sliding_window=300, sliding_layers=(0,)),
    # what Llama has not: norms of what is added, GELU, layers that are not rotated, factors
    "others": tiny_config(
        norms_after=True,
        qk_norm=True,
        qk_norm_whole=True,
        activation="gelu_tanh",
        unrotated_layers=(1,),
        embedding_scale=3.0,
        residual_scale=0.5,
        attention_scale=0.1,
        max_position_embeddings=1024,
    ),
    # of 601 rows at once so many pairs that they are two passes, and runs of one expert are cut
    "experts": tiny_config(
        num_experts=20,
        experts_per_token=16,
        expert_intermediate_size=32,
        router_bias=True,
        attention_sinks=True,
        dense_layers=(1,),
        activation="clamped_swiglu",
        swiglu_limit=0.5,
        max_position_embeddings=1024,
    ),
    # scores and logits, which have deviations of about 1 and 10, are bent
    "capped": tiny_config(
        attention_softcap=0.8,
        logits_softcap=12.0,
        max_position_embeddings=1024,
        sliding_window=300,
        sliding_layers=(0,),
    ),
    "heads": tiny_config(num_attention_heads=2, num_key_value_heads=2, head_dim=48, hidden_size=96),
}
FORMATS = list(
    itertools.product(("float32", "bfloat16", "int8", "q4"), ("float32", "bfloat16", "int8"))
)


@cache
def _ids(config: str) -> NDArray[np.int64]:
    """[1 + OTHERS, LENGTH]; the first is the request."""
    random = np.random.default_rng(3)
    return random.integers(0, CONFIGS[config].vocab_size, (1 + OTHERS, LENGTH))


class Request:
    """One request in a model of its own, from its first token on."""

    def __init__(
        self, name: str, isa: str, dtype: str, kv: str, *, threads: int = 2, turned: bool = False
    ) -> None:
        self.config, self.ids = CONFIGS[name], _ids(name)
        self.model = _make(self.config, isa, dtype, kv, threads)
        # whatever slots hold that were never written must not be felt
        cache_bytes(self.model)[:] = 0xFF
        self.done = 0
        self.table = np.arange(BLOCKS)[:: -1 if turned else 1]

    def step(self, count: int, others: int = 0) -> Logits:
        """Logits of the next ``count`` tokens, beside ``others`` requests with a first token each.
        Where the others are an odd number they come before the request."""
        end = self.done + count
        counts = [count, *[1] * others]
        ids = [self.ids[0, self.done : end], *self.ids[1 : 1 + others, :1]]
        positions = [np.arange(self.done, end), *[np.zeros(1, dtype=np.int64)] * others]
        tables = [self.table, *(np.full(BLOCKS, BLOCKS + i) for i in range(others))]
        if others % 2:
            for values in (counts, ids, positions, tables):
                values.reverse()
        first = others if others % 2 else 0
        out = self.model.forward(
            np.concatenate(ids),
            np.concatenate(positions),
            np.cumsum([0, *counts]),
            np.array(tables),
            np.arange(first, first + count),
        )
        self.done = end
        return out.copy()


def _make(config: ModelConfig, isa: str, dtype: str, kv: str, threads: int) -> NativeModel:
    return NativeModel(
        config,
        random_weights(config, 5).items(),
        rope_tables(config, LENGTH),
        NativeSettings(
            dtype=dtype, kv_dtype=kv, isa=isa, threads=threads, num_blocks=BLOCKS + OTHERS
        ),
    )


def _ways(name: str, isa: str, dtype: str, kv: str) -> Iterator[tuple[str, Logits, Logits]]:
    """What happened, the logits found and those of the same positions in one step of all tokens."""
    whole = Request(name, isa, dtype, kv).step(LENGTH)
    request = Request(name, isa, dtype, kv, threads=1, turned=True)
    for count in (250, 7, 1, 93, 13, 236, 1):
        start = request.done
        got = request.step(count)
        yield f"a chunk of {count} at {start}, other blocks", got, whole[start : request.done]
    # decoding around the end of a part, and where three are shared out
    request = Request(name, isa, dtype, kv, threads=3)
    for begin in (250, 570):
        start = request.done
        yield f"a prompt up to {begin}", request.step(begin - start), whole[start:begin]
        for others in (0, 1, 0, 6, 15, 0, 32, OTHERS, 2, 5, 0, 11, 0, 3, 0):
            start = request.done
            got = request.step(1, others)
            yield f"decoding at {start} beside {others}", got, whole[start : request.done]


CASES = [
    (name, dtype, kv)
    for name, (dtype, kv) in itertools.product(CONFIGS, FORMATS)
    # other shapes change attention alone
    if name == "llama" or dtype == ("q4" if kv == "bfloat16" else kv)
]


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize(("name", "dtype", "kv"), CASES)
def test_logits_are_the_same_bit_for_bit(isa: str, name: str, dtype: str, kv: str) -> None:
    different = [
        f"{way}: {np.abs(got - expected).max():.2g}"
        for way, got, expected in _ways(name, isa, dtype, kv)
        if not np.array_equal(got, expected)
    ]
    assert not different


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("name", ["llama", "sliding"])
@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_rows_that_nobody_asks_for_change_nothing(isa: str, name: str, kv: str) -> None:
    """The last layer computes what is asked for, here in contexts that members share."""

    def logits(asked: list[int]) -> Logits:
        model = _make(CONFIGS[name], isa, "float32", kv, threads=3)
        cache_bytes(model)[:] = 0xFF
        tables = np.arange(2 * BLOCKS).reshape(2, BLOCKS)
        for begin, end, rows in ((0, 590, []), (590, LENGTH, asked)):
            starts = np.arange(3) * (end - begin)
            out = model.forward(
                _ids(name)[:2, begin:end].ravel(),
                np.tile(np.arange(begin, end), 2),
                starts,
                tables,
                np.array(rows, dtype=np.int64),
            )
        return out.copy()

    whole = logits(list(range(2 * (LENGTH - 590))))
    assert np.isfinite(whole).all()
    for asked in ([0], [10], [21], [3, 12], [10, 21]):
        np.testing.assert_array_equal(logits(asked), whole[asked])
