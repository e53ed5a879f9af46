"""TorchAttention against attention written out in float64, with NaN wherever nothing is owned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch import attention as attention_module
from paceline.backends.torch.attention import TorchAttention, block_bytes
from paceline.checkpoints.model.config import ModelConfig, RopeConfig

BLOCK_SIZE = 4
NUM_BLOCKS = 600


def make_config(heads: int = 6, kv_heads: int = 2, window: int | None = None) -> ModelConfig:
    return ModelConfig(
        model_type="mistral",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        sliding_window=window,
        # layer 0 sees everything
        sliding_layers=(1,) if window else (),
    )


def reference(config: ModelConfig, layer: int, start: int, qkv: torch.Tensor) -> torch.Tensor:
    """Attention of positions ``start ...`` of one sequence [length, heads + 2 * kv_heads, dim]."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    wide = qkv.double()
    out = []
    for position in range(start, len(wide)):
        first = 0
        if layer in config.sliding_layers and config.sliding_window:
            first = max(0, position - config.sliding_window + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            key = wide[first : position + 1, heads + kv_head]
            value = wide[first : position + 1, heads + kv_heads + kv_head]
            weights = (key @ wide[position, head] / math.sqrt(config.head_dim)).softmax(0)
            out.append(weights @ value)
    return torch.stack(out).view(len(wide) - start, -1)


class Ragged:
    """Sequences in a cache whose every number starts as NaN."""

    def __init__(
        self, config: ModelConfig, lengths: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.attention = TorchAttention(
            config,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.attention.cache[:, :NUM_BLOCKS] = math.nan
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        free = rng.permutation(NUM_BLOCKS).tolist()
        width = -(-max(lengths) // BLOCK_SIZE)
        # what follows a row's last block must not be read: the last id is somebody's, full of NaN
        self.tables = np.full((len(lengths), width), free[0], dtype=np.int64)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv = []
        for row, length in enumerate(lengths):
            owned = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
            self.tables[row, : len(owned)] = owned
            self.attention.clear_blocks(owned)
            values = torch.randn(2, length, heads, config.head_dim).to(dtype)
            self.qkv.append(values)
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int], tolerance: float = 1e-5) -> None:
        """Compute so many more positions of these rows; check every output."""
        rows = list(counts)
        starts = [self.done[row] for row in rows]
        batch = AttentionBatch(
            np.array(starts), np.array([counts[row] for row in rows]), self.tables[rows]
        )
        self.attention.prepare(batch)
        for layer in range(2):
            parts = [
                self.qkv[row][layer, start : start + counts[row]]
                for row, start in zip(rows, starts, strict=True)
            ]
            got = self.attention.attend(layer, torch.cat(parts)).double()
            expected = torch.cat(
                [
                    reference(
                        self.config, layer, start, self.qkv[row][layer, : start + counts[row]]
                    )
                    for row, start in zip(rows, starts, strict=True)
                ]
            )
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
        for row in rows:
            self.done[row] += counts[row]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_ragged_rows(heads: int, kv_heads: int, window: int | None) -> None:
    ragged = Ragged(make_config(heads, kv_heads, window), [30, 3, 17, 9, 8])
    ragged.step({0: 13, 1: 1, 2: 4})
    ragged.step({3: 8, 0: 1, 2: 1, 1: 2})
    ragged.step({4: 7, 2: 5, 0: 16, 3: 1})
    ragged.step({2: 1, 4: 1})


@pytest.mark.parametrize("window", [None, 50])
def test_very_different_lengths_are_computed_apart(window: int | None) -> None:
    ragged = Ragged(make_config(window=window), [700, 690, *[10] * 30])
    ragged.step({0: 699, 1: 689} | dict.fromkeys(range(2, 32), 7))
    ragged.step(dict.fromkeys(range(31, -1, -1), 1))
    assert len(ragged.attention._groups) == 2
    ragged.step({5: 1, 7: 1})
    assert len(ragged.attention._groups) == 1


def test_long_runs_of_queries_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_MAX_QUERIES", 16)
    ragged = Ragged(make_config(window=20), [67, 21])
    ragged.step({0: 40, 1: 20})
    ragged.step({1: 1, 0: 27})
    # scores of one product are bounded too
    monkeypatch.setattr(attention_module, "_MAX_SCORES", 3000)
    ragged = Ragged(make_config(), [40, 40, 40])
    ragged.step({0: 40, 1: 40, 2: 40})
    sizes = [group.size * group.queries * group.keys * 6 for group in ragged.attention._groups]
    # 16 queries are allowed whatever they cost
    assert max(sizes) <= max(3000, 16 * 40 * 6)


def test_bfloat16() -> None:
    ragged = Ragged(make_config(), [40, 22, 5], torch.bfloat16)
    ragged.step({0: 39, 1: 21, 2: 4}, tolerance=0.05)
    ragged.step({0: 1, 1: 1, 2: 1}, tolerance=0.05)


def test_stale_tails_do_not_leak() -> None:
    """Without clear_blocks, NaN in the unwritten tail of an owned block reaches the output: this
    is why blocks are cleared."""
    ragged = Ragged(make_config(), [6, 12])
    ragged.attention.cache[:, ragged.tables[0, 1]] = math.nan
    with pytest.raises(AssertionError):
        ragged.step({0: 5, 1: 12})


def test_blocks_are_copied_in_order_and_cleared() -> None:
    ragged = Ragged(make_config(), [4, 4])
    ragged.step({0: 4, 1: 4})
    first, second = (int(table[0]) for table in ragged.tables)
    cache = ragged.attention.cache
    old_first, old_second = cache[:, first].clone(), cache[:, second].clone()
    ragged.attention.copy_blocks([(first, 7), (second, first), (first, 8)])
    assert torch.equal(cache[:, 7], old_first)
    assert torch.equal(cache[:, first], old_second)
    assert torch.equal(cache[:, 8], old_second)
    ragged.attention.clear_blocks([7, 8])
    assert not cache[:, [7, 8]].any()
    assert cache[:, first].any()


def test_block_bytes_is_what_the_cache_takes() -> None:
    config = make_config()
    cache = Ragged(config, [1], torch.bfloat16).attention.cache
    held = cache.numel() * cache.itemsize
    assert held == (NUM_BLOCKS + 1) * block_bytes(config, BLOCK_SIZE, torch.bfloat16)
