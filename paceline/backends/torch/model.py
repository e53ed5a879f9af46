"""A Llama-shaped decoder on a flat ragged batch.

All tokens of a step, whichever request they belong to, are rows of the same matrices; only the
attention backend knows requests. Covers Llama 2 and 3, SmolLM2, Mistral and dense Qwen2, 2.5 and 3,
which differ in biases, in norms on queries and keys, in sliding windows and in the scaling of
rotary frequencies.

This module does not know files, blocks, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.backends.torch.attention import AttentionBackend
from paceline.backends.torch.linear import Linear
from paceline.backends.torch.rope import RotaryTable
from paceline.checkpoints.config import ModelConfig

# candidates whose logits are exact; others are too far behind to win by rounding
_NUM_EXACT = 8

__all__ = ["Decoder", "DecoderWeights", "LayerWeights", "RMSNorm"]


class RMSNorm:
    """``x / rms(x) * weight`` over the last dimension, computed in float32, in weight's dtype."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._dtype = weight.dtype
        self._weight = weight.float()
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(
            x.float(), self._weight.shape, self._weight, self._epsilon
        )
        return normed.to(self._dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, ready to compute with."""

    input_norm: RMSNorm
    # [hidden] -> [(heads + 2 * kv_heads) * head_dim]: queries, keys, values
    qkv: Linear
    # over head_dim, before rotation; None where the architecture has none
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    # [heads * head_dim] -> [hidden]
    output: Linear
    mlp_norm: RMSNorm
    # [hidden] -> [2 * intermediate]: gate, up
    gate_up: Linear
    # [intermediate] -> [hidden]
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole model, ready to compute with."""

    # [vocab, hidden]
    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    norm: RMSNorm
    # [hidden] -> [vocab]
    head: Linear
    # the head's weight as it is, [vocab, hidden]; the embedding where they are tied
    head_weight: torch.Tensor


class Decoder:
    """Token ids to logits. Holds no state of requests; ``attention`` does."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable) -> None:
        self._weights = weights
        self._rotary = rotary
        self._vocab_size = config.vocab_size
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._intermediate = config.intermediate_size

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampled: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Run one step for which ``attention`` is prepared.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], below the rotary table's length.
            sampled: int64 [S], the tokens whose logits are wanted; may be empty.

        Returns:
            logits [S, vocab] in float32.
        """
        # the sum of all layers stays in float32: in bfloat16 its rounding decides near ties
        x = torch.nn.functional.embedding(token_ids, self._weights.embedding).float()
        rotation = self._rotary.rows(positions)
        for index, layer in enumerate(self._weights.layers):
            qkv = self._qkv(layer, layer.input_norm(x), rotation)
            x += layer.output(attention.attend(index, qkv))
            x += self._mlp(layer, layer.mlp_norm(x))
        if len(sampled) == 0:
            return x.new_empty(0, self._vocab_size)
        # the head is the largest product: only for the rows that sample
        return self._logits(self._weights.norm(x[sampled]))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """The head's product, with the likeliest tokens' logits exact.

        A product in bfloat16 comes back rounded to 8 bits, which makes ties of the best candidates
        and breaks them by token id; these few are computed again in float32.
        """
        logits = self._weights.head(x)
        if logits.dtype is torch.float32:
            return logits
        logits = logits.float()
        best = logits.topk(min(_NUM_EXACT, self._vocab_size)).indices
        rows = self._weights.head_weight[best].float()
        exact = torch.einsum("sh,skh->sk", x.float(), rows)
        return logits.scatter_(1, best, exact)

    def _qkv(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads = self._heads + self._kv_heads
        qkv = layer.qkv(x).view(-1, heads + self._kv_heads, self._head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = qkv[:, : self._heads], qkv[:, self._heads : heads]
            query.copy_(layer.query_norm(query))
            key.copy_(layer.key_norm(key))
        self._rotary.rotate_(qkv[:, :heads], rotation)
        return qkv

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(x)
        gate, up = gate_up[:, : self._intermediate], gate_up[:, self._intermediate :]
        return layer.down(torch.nn.functional.silu(gate).mul_(up))
