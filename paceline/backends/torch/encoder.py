"""An encoder of BERT's shape on a flat ragged batch: norms after the sums, and attention over the
whole prompt, which decoders that see the whole prompt use too.

This module does not know files, requests or pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.runner.interface import AttentionBatch, Ints
from paceline.backends.torch.linear import Linear, make_linear
from paceline.backends.torch.machine import choose_dtype
from paceline.checkpoints.model.encoder import EncoderConfig, EncoderFiles
from paceline.core.outputs import BlockSwap

__all__ = ["BidirectionalAttention", "Encoder", "load_encoder"]


class BidirectionalAttention:
    """An ``attention.AttentionBackend`` in which every token sees the whole prompt: each prompt is
    computed in one step, so keys and values need not be stored. Prompts of one length are one
    product; nothing is padded, so a prompt's vector does not depend on its neighbours' lengths.

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


_FUNCTIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


class _LayerNorm:
    """A layer norm computed in float32, with its result in the weights' dtype."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, dtype: torch.dtype
    ) -> None:
        self._weight, self._bias = weight, bias
        self._epsilon, self._dtype = epsilon, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(
            x.float(), self._weight.shape, self._weight, self._bias, self._epsilon
        )
        return normed.to(self._dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    qkv: Linear
    attention_output: Linear
    attention_norm: _LayerNorm
    inner: Linear
    output: Linear
    output_norm: _LayerNorm


class Encoder:
    """A ``pooling.runner.HiddenModel`` without a cache; see ``load_encoder``."""

    def __init__(
        self,
        config: EncoderConfig,
        embeddings: Sequence[torch.Tensor],
        embedding_norm: _LayerNorm,
        layers: Sequence[_Layer],
        device: torch.device,
    ) -> None:
        self._config = config
        self._words, self._positions, self._kinds = embeddings
        self._norm = embedding_norm
        self._layers = layers
        self._function = _FUNCTIONS[config.activation]
        self._device = device
        heads = config.num_attention_heads
        head_dim = config.hidden_size // heads
        self._attention = BidirectionalAttention(
            heads, heads, head_dim, head_dim**-0.5, device=device
        )
        self._shape = (-1, 3 * heads, head_dim)

    @torch.inference_mode()
    def hidden(
        self, token_ids: Ints, positions: Ints, batch: AttentionBatch, wanted: Ints, kinds: Ints
    ) -> NDArray[np.float32]:
        """Implement ``HiddenModel.hidden``. An encoder with one kind of token ignores ``kinds``."""
        self._attention.prepare(batch)
        kinds = np.minimum(kinds, self._config.type_vocab_size - 1)
        x = self._norm(
            self._words[self._to_device(token_ids)].float()
            + self._positions[self._to_device(positions + self._config.first_position)]
            + self._kinds[self._to_device(kinds)]
        )
        for index, layer in enumerate(self._layers):
            seen = self._attention.attend(index, layer.qkv(x).view(self._shape))
            x = layer.attention_norm(x.float() + layer.attention_output(seen))
            inner = self._function(layer.inner(x))
            x = layer.output_norm(x.float() + layer.output(inner))
        return x[self._to_device(wanted)].float().cpu().numpy()

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: there are no blocks."""

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        """Do nothing: there are no blocks."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Do nothing: there are no blocks."""


def load_encoder(checkpoint: EncoderFiles, *, dtype: str, device: str, threads: int) -> Encoder:
    """Read a whole encoder. Raises CheckpointError like ``EncoderFiles.tensor``.

    Args:
        threads: processor threads.
    """
    # applies to this thread only, with OpenMP
    torch.set_num_threads(threads)
    config, place, main = checkpoint.config, torch.device(device), choose_dtype(dtype, device)

    def read(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensor(name)).to(device=place, dtype=kind)

    def linear(*names: str) -> Linear:
        weight = torch.cat([read(f"{name}.weight", main) for name in names])
        return make_linear(weight, torch.cat([read(f"{name}.bias", main) for name in names]))

    def norm(name: str) -> _LayerNorm:
        weight, bias = (read(f"{name}.{part}", torch.float32) for part in ("weight", "bias"))
        return _LayerNorm(weight, bias, config.layer_norm_eps, main)

    def layer(index: int) -> _Layer:
        name = f"encoder.layer.{index}"
        return _Layer(
            qkv=linear(*(f"{name}.attention.self.{part}" for part in ("query", "key", "value"))),
            attention_output=linear(f"{name}.attention.output.dense"),
            attention_norm=norm(f"{name}.attention.output.LayerNorm"),
            inner=linear(f"{name}.intermediate.dense"),
            output=linear(f"{name}.output.dense"),
            output_norm=norm(f"{name}.output.LayerNorm"),
        )

    with torch.inference_mode():
        return Encoder(
            config,
            [
                read(f"embeddings.{name}_embeddings.weight", main)
                for name in ("word", "position", "token_type")
            ],
            norm("embeddings.LayerNorm"),
            [layer(index) for index in range(config.num_hidden_layers)],
            place,
        )
