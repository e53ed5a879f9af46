"""A decoder on a flat ragged batch.

All tokens of a step are rows of the same matrices, across requests; only the attention backend
knows requests. Architectures differ as their ModelConfig says; a part that an architecture lacks is
None, or a factor of 1 that is not multiplied by.

This module does not know files, blocks, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from paceline.backends.torch.adapters import StepAdapters
from paceline.backends.torch.attention import AttentionBackend, RotaryTable
from paceline.backends.torch.linear import MLP, Adapt, Linear
from paceline.checkpoints.model.config import ModelConfig

# number of candidates with exact logits; others are too far behind to win by rounding
_NUM_EXACT = 8

__all__ = ["Decoder", "DecoderWeights", "LayerWeights", "RMSNorm"]


class RMSNorm:
    """``x / rms(x) * (weight + offset)`` over the last dimension, computed in float32, returned in
    weight's dtype."""

    def __init__(self, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> None:
        self._dtype = weight.dtype
        self._weight = weight.float() + offset
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(
            x.float(), self._weight.shape, self._weight, self._epsilon
        )
        return normed.to(self._dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, ready to compute with."""

    # a norm is None where the architecture lacks it
    input_norm: RMSNorm | None
    # [hidden] -> [(heads + 2 * kv_heads) * head_dim]: queries, keys, values
    qkv: Linear
    # over head_dim, or over all heads together, before rotation
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    # [heads], see ModelConfig.attention_sinks
    sinks: torch.Tensor | None
    # [heads * head_dim] -> [hidden]
    output: Linear
    # applied to attention's output before it is added to the sum
    attention_output_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp: MLP
    # applied to the MLP's output before it is added to the sum
    mlp_output_norm: RMSNorm | None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole model, ready to compute with."""

    # [vocab, hidden]
    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    norm: RMSNorm
    # [hidden] -> [vocab]; None: only hidden states are wanted
    head: Linear | None
    # the head's weight as it is, [vocab, hidden]; the embedding where they are tied
    head_weight: torch.Tensor


class Decoder:
    """Token ids to logits. ``attention`` holds the state of requests; this class holds none."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rotary: RotaryTable,
        sliding_rotary: RotaryTable | None = None,
    ) -> None:
        self._weights = weights
        # distinct rotary tables of the layers, and each layer's index; None: it is not rotated
        self._tables = [rotary] if sliding_rotary is None else [rotary, sliding_rotary]
        self._table_of: list[int | None] = [0] * config.num_hidden_layers
        if sliding_rotary is not None:
            for layer in config.sliding_layers:
                self._table_of[layer] = 1
        for layer in config.unrotated_layers:
            self._table_of[layer] = None
        # layers whose input is kept, and their inputs in the last step, in order
        self._keeps: tuple[int, ...] = ()
        self.kept: list[torch.Tensor] = []
        self._config = config
        self._dtype = weights.embedding.dtype
        self._vocab_size = config.vocab_size
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim

    @property
    def weights(self) -> DecoderWeights:
        return self._weights

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers in ``kept`` from now on, each [T, hidden] in the weights'
        dtype, after every step; the number of layers stands for the last one's output."""
        self._keeps, self.kept = layers, []

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampled: torch.Tensor,
        attention: AttentionBackend,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Run one step for which ``attention`` is prepared.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], below the rotary table's length.
            sampled: int64 [S], the tokens whose logits are wanted; may be empty.
            adapters: of the step's rows; None: no row has one.

        Returns:
            logits [S, vocab] in float32.
        """
        if len(sampled) == 0:
            self._layers(token_ids, positions, attention, adapters)
            return self._weights.embedding.new_empty((0, self._vocab_size), dtype=torch.float32)
        # the head is the largest product, so it is computed only for rows that sample
        return self.logits(self.hidden(token_ids, positions, sampled, attention, adapters))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map the result of ``hidden``, [S, hidden], to logits [S, vocab] in float32."""
        logits = self._logits(x)
        if self._config.logits_divisor != 1.0:
            logits /= self._config.logits_divisor
        if (cap := self._config.logits_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: AttentionBackend,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Run a step as ``forward`` does, and return the head's input, [S, hidden] in its dtype."""
        return self._weights.norm(self._layers(token_ids, positions, attention, adapters)[wanted])

    def _layers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        adapters: StepAdapters | None,
    ) -> torch.Tensor:
        """Return the sum of all layers, [T, hidden] in float32."""
        # the sum of all layers stays in float32: in bfloat16 its rounding decides near ties
        x = torch.nn.functional.embedding(token_ids, self._weights.embedding).float()
        if self._config.embedding_scale != 1.0:
            x *= self._config.embedding_scale
        rotations = self.rotations(positions)
        kept: dict[int, torch.Tensor] = {}
        for index in range(len(self._weights.layers)):
            if index in self._keeps:
                kept[index] = x.to(self._dtype, copy=True)
            self.add_layer(index, x, rotations, attention, adapters=adapters)
        if len(self._weights.layers) in self._keeps:
            kept[len(self._weights.layers)] = x.to(self._dtype, copy=True)
        self.kept = [kept[layer] for layer in self._keeps]
        return x

    def rotations(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines of a step's positions for ``add_layer``, for all layers."""
        return [table.rows(positions) for table in self._tables]

    def add_layer(
        self,
        index: int,
        x: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Add a layer's output to ``x``, [T, hidden] in float32, in place, and return ``x``. With
        ``wanted``, leave ``x`` and return a copy of these rows with the output added."""
        layer, share = self._weights.layers[index], self._config.residual_scale
        table = self._table_of[index]
        own = None if adapters is None else partial(adapters.add, index)
        qkv = self._qkv(layer, self._normed(layer.input_norm, x), own)
        if table is not None:
            self._tables[table].rotate_(qkv[:, : self._heads + self._kv_heads], rotations[table])
        attended = attention.attend(index, qkv)
        # the widest of long prompts, but for the MLP's
        del qkv
        if wanted is not None:
            x, attended = x[wanted], attended[wanted]
            if not len(x):
                return x
        given, attended = attended, layer.output(attended)
        if own is not None:
            own("self_attn.o_proj", given, attended)
        if layer.attention_output_norm is not None:
            attended = layer.attention_output_norm(attended)
        x.add_(attended, alpha=share)
        del given, attended
        inner = layer.mlp(self._normed(layer.mlp_norm, x), own)
        if layer.mlp_output_norm is not None:
            inner = layer.mlp_output_norm(inner)
        return x.add_(inner, alpha=share)

    def _normed(self, norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype) if norm is None else norm(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's product, with exact logits for the likeliest tokens.

        A product in bfloat16 is rounded to 8 bits, which makes ties of the best candidates and
        breaks them by token id; these few are computed again in float32.
        """
        assert self._weights.head is not None, "loaded for its hidden states alone"
        logits = self._weights.head(x)
        if logits.dtype is torch.float32:
            return logits
        logits = logits.float()
        best = logits.topk(min(_NUM_EXACT, self._vocab_size)).indices
        rows = self._weights.head_weight[best].float()
        exact = torch.einsum("sh,skh->sk", x.float(), rows)
        return logits.scatter_(1, best, exact)

    def _qkv(self, layer: LayerWeights, x: torch.Tensor, adapt: Adapt | None) -> torch.Tensor:
        """Return queries and keys, unrotated, and values: [T, heads + 2 * kv_heads, head_dim]."""
        heads = self._heads + self._kv_heads
        flat = layer.qkv(x)
        if adapt is not None:
            queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
            adapt("self_attn.q_proj", x, flat, 0)
            adapt("self_attn.k_proj", x, flat, queries)
            adapt("self_attn.v_proj", x, flat, queries + keys)
        qkv = flat.view(-1, heads + self._kv_heads, self._head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = qkv[:, : self._heads], qkv[:, self._heads : heads]
            if self._config.qk_norm_whole:
                query.copy_(layer.query_norm(query.flatten(1)).view_as(query))
                key.copy_(layer.key_norm(key.flatten(1)).view_as(key))
            else:
                query.copy_(layer.query_norm(query))
                key.copy_(layer.key_norm(key))
        return qkv
