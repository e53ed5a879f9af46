"""Loading of a checkpoint into PyTorch: weights, decoder and paged cache on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from paceline.backends.machine.cpu import CPU_SHARE, available_memory, swap_seconds
from paceline.backends.runner.interface import LoadedModel, PoolMemory
from paceline.backends.torch.adapters import TorchAdapter
from paceline.backends.torch.attention import (
    AttentionBackend,
    RotaryTable,
    TorchAttention,
    block_bytes,
)
from paceline.backends.torch.encoder import BidirectionalAttention
from paceline.backends.torch.machine import choose_dtype
from paceline.backends.torch.model import Decoder
from paceline.backends.torch.sampler import token_logprobs
from paceline.backends.torch.step import TorchSampler, TorchStep
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.model.adapter import AdapterValues
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.core.outputs import BlockSwap

__all__ = ["TorchLoader"]

_CUDA_SHARE: Final = 0.9
# default bytes of host memory for swapping on CUDA
_PINNED_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchLoader:
    """A ``interface.ModelLoader`` for formats settled by ``choose_formats``."""

    checkpoint: Checkpoint
    dtype: str
    device: str
    block_size: int
    max_model_len: int
    # processor threads
    threads: int
    # False: hidden states are wanted, and no logits
    has_head: bool = True

    @property
    def block_bytes(self) -> int:
        if self.checkpoint.config.bidirectional:
            # without a cache, keys and values are used where they are made
            return 0
        dtype = choose_dtype(self.dtype, self.device)
        return block_bytes(self.checkpoint.config, self.block_size, dtype)

    @property
    def window(self) -> int:
        config = self.checkpoint.config
        return (config.sliding_window or 0) if config.sliding_layers and self.block_bytes else 0

    @property
    def window_block_bytes(self) -> int:
        config = self.checkpoint.config
        return self.block_bytes * len(config.sliding_layers) // config.num_hidden_layers

    @property
    def max_host_bytes(self) -> float:
        # on CUDA host memory is pinned, so it is allocated at once
        return _PINNED_BYTES if self._on_cuda else math.inf

    @property
    def _on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def pool_memory(self) -> PoolMemory:
        if self._on_cuda:
            return PoolMemory(torch.cuda.mem_get_info(torch.device(self.device))[0], _CUDA_SHARE)
        return PoolMemory(available_memory(), CPU_SHARE)

    def load(
        self, num_blocks: int, num_host_blocks: int, num_window_blocks: int = 0
    ) -> LoadedModel:
        # applies to this thread only, with OpenMP
        torch.set_num_threads(self.threads)
        config, device = self.checkpoint.config, torch.device(self.device)
        dtype = choose_dtype(self.dtype, self.device)
        with torch.inference_mode():
            weights = load_weights(
                self.checkpoint, dtype=dtype, device=device, has_head=self.has_head
            )
            table = partial(RotaryTable, config, self.max_model_len, dtype=dtype, device=device)
            sliding = None if config.sliding_rope is None else table(rope=config.sliding_rope)
            decoder = Decoder(config, weights, table(), sliding)
            attention: AttentionBackend
            if config.bidirectional:
                attention = BidirectionalAttention(
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    config.head_dim,
                    config.scale,
                    sliding=frozenset(config.sliding_layers),
                    window=config.sliding_window,
                    device=device,
                )
            else:
                attention = TorchAttention(
                    config,
                    num_blocks=num_blocks,
                    block_size=self.block_size,
                    dtype=dtype,
                    device=device,
                    num_host_blocks=num_host_blocks,
                    num_window_blocks=num_window_blocks,
                    sinks=[layer.sinks for layer in weights.layers],
                )
        step = TorchStep(decoder, attention, device)

        def move(count: int) -> None:
            # half of the blocks move out, half move back
            there = [BlockSwap(block, block, True) for block in range((count + 1) // 2)]
            back = [BlockSwap(block, block, False) for block in range(count // 2)]
            step.swap_blocks([*there, *back])
            if self._on_cuda:
                torch.cuda.synchronize(device)

        # blocks of a model without a cache take no memory
        swapped = min(num_blocks, num_host_blocks) if self.block_bytes else 0
        seconds = swap_seconds(move, swapped, self.block_bytes or 1)

        def make_adapter(
            values: AdapterValues, *, dtype: str, pause: Callable[[], None]
        ) -> TorchAdapter:
            own = torch.float32 if dtype == "float32" else torch.bfloat16
            return TorchAdapter(values, dtype=own, device=device, pause=pause)

        return LoadedModel(step, TorchSampler(), token_logprobs, seconds, make_adapter)
