"""Common parts of heads in PyTorch that read hidden states: a KV cache, and arrays to tensors.

This module does not know layers, requests, or where hidden states come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.backends.runner.interface import AttentionBatch, Ints
from paceline.backends.torch.attention import TorchAttention
from paceline.checkpoints.model.config import ModelConfig

__all__ = ["HeadSettings", "TorchHead"]


class HeadSettings(NamedTuple):
    """Settings for computing a head, in addition to the configuration of its layers."""

    # tokens per block of its KV cache
    block_size: int
    # positions of the longest request
    max_model_len: int
    # format of its weights and cache
    dtype: torch.dtype
    device: torch.device


class TorchHead(ABC):
    """Base of heads that are a ``draft_head.HeadModel``.

    Args:
        config: configuration of its layers.
        num_blocks: blocks of its KV cache.
    """

    def __init__(self, config: ModelConfig, settings: HeadSettings, num_blocks: int) -> None:
        self._device = settings.device
        self._attention = TorchAttention(
            config,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            dtype=settings.dtype,
            device=settings.device,
        )

    @torch.inference_mode()
    def start(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        features: Sequence[torch.Tensor],
        sampled: Ints,
    ) -> torch.Tensor:
        self._attention.prepare(batch)
        tokens, at, chosen = map(self._tensor, (token_ids, positions, sampled))
        return self._start(tokens, at, batch, torch.cat(list(features)), chosen)

    @torch.inference_mode()
    def go_on(
        self, token_ids: Ints, positions: Ints, batch: AttentionBatch, rows: Ints
    ) -> torch.Tensor:
        self._attention.prepare(batch)
        tokens, at, chosen = map(self._tensor, (token_ids, positions, rows))
        return self._go_on(tokens, at, chosen)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._attention.copy_blocks(pairs)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self._attention.clear_blocks(block_ids)

    @abstractmethod
    def _start(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        batch: AttentionBatch,
        features: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``start`` with attention prepared: [S, vocab] in float32."""

    @abstractmethod
    def _go_on(self, tokens: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute ``go_on`` with attention prepared: [rows, vocab] in float32."""

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
