"""``model.Decoder`` and its paged attention for the runner: arrays in, a tensor out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.runner.interface import AttentionBatch, Ints
from paceline.backends.runner.sampling import SampleRow, Samples
from paceline.backends.torch.adapters import StepAdapters
from paceline.backends.torch.attention import AttentionBackend, TorchAttention
from paceline.backends.torch.model import Decoder, DecoderWeights
from paceline.backends.torch.sampler import sample
from paceline.core.outputs import BlockSwap, WindowBlock

__all__ = ["TorchSampler", "TorchStep"]


class TorchStep:
    """A ``interface.StepModel``. Its logits are tensors on ``device``."""

    # the sampler finds the likeliest tokens itself
    likeliest = None

    def __init__(self, decoder: Decoder, attention: AttentionBackend, device: torch.device) -> None:
        # see ``draft_head.FeatureModel``
        self.feature_layers: tuple[int, ...] = ()
        self._decoder = decoder
        self._attention = attention
        self._device = device

    @property
    def features(self) -> torch.Tensor:
        """Implement ``draft_head.FeatureModel.features``."""
        return torch.cat(self._decoder.kept, dim=-1)

    @property
    def weights(self) -> DecoderWeights:
        """The model's weights, for heads that share some of them."""
        return self._decoder.weights

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        sampled: Ints,
        *,
        needs_logits: bool = True,
    ) -> torch.Tensor:
        self._attention.prepare(batch)
        self._decoder.keep_inputs(self.feature_layers)
        return self._decoder.forward(
            torch.from_numpy(token_ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(sampled).to(self._device),
            self._attention,
            None
            if batch.adapters is None
            else StepAdapters(batch.adapters, batch.counts.tolist(), self._device),
        )

    @torch.inference_mode()
    def hidden(
        self, token_ids: Ints, positions: Ints, batch: AttentionBatch, wanted: Ints, kinds: Ints
    ) -> NDArray[np.float32]:
        """Implement ``pooling.runner.HiddenModel.hidden``; decoders ignore ``kinds``."""
        self._attention.prepare(batch)
        states = self._decoder.hidden(
            torch.from_numpy(token_ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(wanted).to(self._device),
            self._attention,
        )
        return states.float().cpu().numpy()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._attention.copy_blocks(pairs)

    @torch.inference_mode()
    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        self._attention.swap_blocks(swaps)

    def block_layout(self) -> tuple[int, str] | None:
        """Implement ``interface.CopyableModel.block_layout``. A release of PyTorch, or another
        device or level, may give other bits."""
        attention = self._attention
        if not isinstance(attention, TorchAttention) or attention.has_window_blocks:
            return None
        device = self._device
        level = torch.backends.cpu.get_cpu_capability()
        if device.type == "cuda":
            level = torch.cuda.get_device_name(device)
        return attention.block_bytes, f"torch {torch.__version__} {level}"

    @torch.inference_mode()
    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        assert isinstance(self._attention, TorchAttention), "others have no KV cache"
        return self._attention.read_blocks(block_ids)

    @torch.inference_mode()
    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        assert isinstance(self._attention, TorchAttention), "others have no KV cache"
        self._attention.write_blocks(block_ids, data)

    @torch.inference_mode()
    def place(self, given: Sequence[WindowBlock]) -> None:
        """Implement ``steps.WindowedModel.place``."""
        assert isinstance(self._attention, TorchAttention), "others have no KV cache"
        self._attention.place(given)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self._attention.clear_blocks(block_ids)


class TorchSampler:
    """A ``interface.Sampler`` of tensors."""

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        likeliest: NDArray[np.int32] | None,
    ) -> Samples:
        return sample(logits, rows, likeliest)
