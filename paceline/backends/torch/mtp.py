"""A checkpoint's MTP layers in PyTorch, over its model's embeddings and head.

The input for position ``p`` is the served model's hidden state there; with the token at ``p + 1``
the first layer predicts the one at ``p + 2``. Each further draft is made at the next position by
the next layer, from the output of the layer before it one position earlier; the last layer makes
all further drafts from its own output. So with layers 0 and 1, and ``j`` the position of the last
known token::

    position       j-2           j-1           j             j+1
    layer 0        known j-2     known j-1     .             .
    layer 1        0's of j-3    0's of j-2    0's of j-1    1's of j
    draft                        first         second        third

A layer's entries of known positions need the outputs of the layer before it, so these are kept in
blocks, as keys and values are. A missing output, as at the beginning, counts as zero.

This module does not know requests, or where hidden states come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.attention import RotaryTable, block_bytes
from paceline.backends.torch.head import HeadSettings, TorchHead
from paceline.backends.torch.linear import Linear
from paceline.backends.torch.model import Decoder, DecoderWeights, RMSNorm
from paceline.backends.torch.weights import TensorReader
from paceline.checkpoints.heads.mtp import MTPLayers

__all__ = ["MTPStep", "mtp_block_bytes"]


def mtp_block_bytes(layers: MTPLayers, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a block: keys and values, and outputs of all layers but the last."""
    given = (layers.num_layers - 1) * layers.config.hidden_size * block_size * dtype.itemsize
    return block_bytes(layers.config, block_size, dtype) + given


class _Input(NamedTuple):
    """The parts around one layer."""

    token_norm: RMSNorm
    hidden_norm: RMSNorm
    # [2 * hidden] -> [hidden]
    projection: Linear
    final_norm: RMSNorm


class MTPStep(TorchHead):
    """A checkpoint's MTP layers as a ``draft_head.HeadModel``.

    Args:
        served: the served model's weights.
        num_blocks: blocks of the layers' KV cache.
    """

    def __init__(
        self, layers: MTPLayers, served: DecoderWeights, settings: HeadSettings, num_blocks: int
    ) -> None:
        config, dtype, device = layers.config, settings.dtype, settings.device
        super().__init__(config, settings, num_blocks)
        self._layout, self._served = layers.layout, served
        self._vocab_size = config.vocab_size
        self._block_size = settings.block_size
        self._inputs: list[_Input] = []
        with ExitStack() as stack:
            reader = TensorReader(layers, dtype, device, stack, layers.shapes)
            for parts in (layers.layout.parts.of(n) for n in range(layers.num_layers)):
                self._inputs.append(
                    _Input(
                        reader.norm(parts.token_norm),
                        reader.norm(parts.hidden_norm),
                        reader.linear(parts.projection.removesuffix(".weight")),
                        reader.norm(parts.final_norm),
                    )
                )
            own = DecoderWeights(
                embedding=served.embedding,
                layers=tuple(reader.layers()),
                norm=served.norm,
                head=served.head,
                head_weight=served.head_weight,
            )
        rotary = RotaryTable(config, settings.max_model_len, dtype=dtype, device=device)
        self._decoder = Decoder(config, own, rotary)
        # outputs of each layer but the last, by slot; one slot more stays zero
        self._given = torch.empty(
            layers.num_layers - 1, num_blocks + 1, settings.block_size, config.hidden_size,
            dtype=dtype, device=device,
        )  # fmt: skip
        self._given[:, num_blocks] = 0
        self._none = num_blocks * settings.block_size
        # drafts of the rows whose logits were wanted last, and each layer's outputs for these
        self._num_made = 0
        self._last: list[torch.Tensor] = []

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(pairs)
        for source, destination in pairs:
            self._given[:, destination] = self._given[:, source]

    def _start(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        batch: AttentionBatch,
        features: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        embedded, rotations = self._embedded(tokens, at), self._decoder.rotations(at)
        known = self._served.norm(features) if self._layout.normed else features
        self._num_made, self._last = 1, []
        own, before = self._slots(batch) if len(self._inputs) > 1 else (None, None)
        for layer, kept in enumerate(self._given.flatten(1, 2)):
            given = self._layer(layer, embedded, known, rotations)
            self._last.append(given[sampled])
            kept[own] = given
            known = kept[before]
        # the last layer's output is needed only where logits are wanted
        last = len(self._inputs) - 1
        self._last.append(self._layer(last, embedded, known, rotations, sampled))
        return self._logits(0)

    def _go_on(self, tokens: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        embedded, rotations = self._embedded(tokens, at), self._decoder.rotations(at)
        num_drafts = min(self._num_made, len(self._inputs) - 1)
        last = [given[rows] for given in self._last]
        # layers behind the drafting one also need an entry of this position, for later drafts
        for layer in range(num_drafts, len(self._inputs)):
            # beyond the last layer, its input is its own output
            repeats = self._num_made > layer
            known = last[layer if repeats else layer - 1]
            self._last[layer] = self._layer(layer, embedded, known, rotations)
        # layers before it make no further drafts
        for layer in range(num_drafts):
            self._last[layer] = last[layer]
        self._num_made += 1
        return self._logits(num_drafts)

    def _embedded(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        embedded = torch.nn.functional.embedding(tokens, self._served.embedding)
        if self._layout.masks_first:
            embedded = embedded.masked_fill((at == 0)[:, None], 0.0)
        return embedded

    def _layer(
        self,
        layer: int,
        embedded: torch.Tensor,
        known: torch.Tensor,
        rotations: list[tuple[torch.Tensor, torch.Tensor]],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a layer's normed output for the positions, or for those ``wanted``: [T, hidden] in
        the weights' dtype."""
        around = self._inputs[layer]
        both = [around.token_norm(embedded), around.hidden_norm(known)]
        if self._layout.hidden_first:
            both.reverse()
        x = around.projection(torch.cat(both, dim=-1)).float()
        x = self._decoder.add_layer(layer, x, rotations, self._attention, wanted)
        return around.final_norm(x)

    def _logits(self, layer: int) -> torch.Tensor:
        last = self._last[layer]
        if not len(last):
            return last.new_empty((0, self._vocab_size), dtype=torch.float32)
        return self._decoder.logits(last)

    def _slots(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each position's slot and the slot of the position before; the first position of a
        request has none before it and gets the slot that is zero."""
        size = self._block_size
        own, before = [], []
        for start, count, table in zip(
            batch.starts.tolist(), batch.counts.tolist(), batch.block_tables, strict=True
        ):
            at = np.arange(start - 1, start + count)
            slots = table[at // size] * size + at % size
            if not start:
                slots[0] = self._none
            own.append(slots[1:])
            before.append(slots[:-1])
        return self._tensor(np.concatenate(own)), self._tensor(np.concatenate(before))
