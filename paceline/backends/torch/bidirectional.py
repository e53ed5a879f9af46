"""Attention in which every token sees the whole prompt: for encoders, without a cache.

Each prompt is computed in one step, so keys and values need not be stored. Prompts of one length
are one product; nothing is padded, so a prompt's vector does not depend on its neighbours' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.core.outputs import BlockSwap

__all__ = ["BidirectionalAttention"]


class BidirectionalAttention:
    """An ``attention.AttentionBackend`` that keeps no state between steps.

    Args:
        scale: factor on scores.
        window: layers in ``sliding`` see ``window - 1`` tokens to either side; None: all tokens.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        sliding: frozenset[int] = frozenset(),
        window: int | None = None,
        device: torch.device,
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._scale = scale
        self._sliding, self._window = sliding, window
        self._device = device
        # for each length of prompts, their tokens, [prompts, length]
        self._groups: list[torch.Tensor] = []

    def prepare(self, batch: AttentionBatch) -> None:
        """Implement ``AttentionBackend.prepare``. Every row holds a whole prompt."""
        assert not batch.starts.any(), "an encoder's prompt was cut"
        firsts = np.cumsum(batch.counts) - batch.counts
        self._groups = [
            torch.from_numpy(firsts[batch.counts == length][:, None] + np.arange(length)).to(
                self._device
            )
            for length in np.unique(batch.counts)
        ]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Implement ``AttentionBackend.attend``; tokens see their whole prompt, or a window."""
        out = qkv.new_empty(qkv.shape[0], self._heads * self._head_dim)
        for tokens in self._groups:
            count, length = tokens.shape
            # [prompts, heads, length, head_dim]
            given = qkv[tokens].transpose(1, 2)
            keys, values = self._heads, self._heads + self._kv_heads
            query, key, value = given[:, :keys], given[:, keys:values], given[:, values:]
            seen = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self._mask(layer, length),
                scale=self._scale,
                enable_gqa=self._heads != self._kv_heads,
            )
            out[tokens] = seen.transpose(1, 2).reshape(count, length, -1)
        return out

    def _mask(self, layer: int, length: int) -> torch.Tensor | None:
        """Return a mask that is true where a token sees another one; None: everywhere."""
        if self._window is None or layer not in self._sliding or length <= self._window:
            return None
        place = torch.arange(length, device=self._device)
        return (place[:, None] - place).abs() < self._window

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: there are no blocks."""

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        """Do nothing: there are no blocks."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""
