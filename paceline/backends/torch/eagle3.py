"""An EAGLE-3 head in PyTorch: one layer over a token's embedding and the features before it.

The features of position ``p`` are the served model's hidden states there, combined by ``fc``;
beyond the positions that the served model has computed, they are the head's own last output. With
the token at ``p + 1`` they predict the token at ``p + 2``.

This module does not know requests, or where hidden states come from.
"""

from __future__ import annotations

from typing import Final

import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.attention import RotaryTable
from paceline.backends.torch.head import HeadSettings, TorchHead
from paceline.backends.torch.linear import DenseMLP, Linear, make_linear
from paceline.backends.torch.model import RMSNorm
from paceline.checkpoints.heads.eagle3 import LAYER, Eagle3Head

__all__ = ["Eagle3Step"]

# logit of a token that the head lacks: finite, as is its sum over a vocabulary
_NEVER: Final = -1e30


class Eagle3Step(TorchHead):
    """An EAGLE-3 head as a ``draft_head.HeadModel``.

    Args:
        embedding: the served model's, [vocab, hidden].
        num_blocks: blocks of the head's KV cache.
    """

    def __init__(
        self, head: Eagle3Head, embedding: torch.Tensor, settings: HeadSettings, num_blocks: int
    ) -> None:
        config, dtype, device = head.config, settings.dtype, settings.device
        super().__init__(config, settings, num_blocks)

        def get(name: str) -> torch.Tensor:
            return torch.from_numpy(head.tensor(name)).to(device=device, dtype=dtype)

        def linear(*names: str) -> Linear:
            """Make one product of several projections of the same input."""
            weights = [get(f"{name}.weight") for name in names]
            biases = [get(f"{name}.bias") for name in names if head.has(f"{name}.bias")]
            return make_linear(torch.cat(weights), torch.cat(biases) if biases else None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(get(f"{name}.weight"), config.rms_norm_eps)

        self._vocab_size = len(embedding)
        self._embedding = get("embed_tokens.weight") if head.embeds else embedding
        self._fuse = linear("fc")
        self._input_norm, self._hidden_norm = (
            norm(f"{LAYER}.input_layernorm"), norm(f"{LAYER}.hidden_norm"),
        )  # fmt: skip
        self._qkv = linear(*(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"))
        self._output = linear(f"{LAYER}.self_attn.o_proj")
        self._mlp_norm = norm(f"{LAYER}.post_attention_layernorm")
        gate_up = linear(f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")
        self._mlp = DenseMLP(gate_up, linear(f"{LAYER}.mlp.down_proj"), config.activation)
        self._norm, self._head = norm("norm"), linear("lm_head")
        self._ids = torch.from_numpy(head.token_ids()).to(device)
        self._norm_before_residual = head.norm_before_residual
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        length = max(settings.max_model_len, config.longest)
        self._rotary = RotaryTable(config, length, dtype=dtype, device=device)
        # output for the rows whose logits were wanted last
        self._last = torch.empty(0, config.hidden_size, device=device)

    def _start(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        batch: AttentionBatch,
        features: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        return self._forward(tokens, at, self._fuse(features).float(), sampled)

    def _go_on(self, tokens: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        every = torch.arange(len(rows), device=self._device)
        return self._forward(tokens, at, self._last[rows], every)

    def _forward(
        self, tokens: torch.Tensor, at: torch.Tensor, known: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [S, vocab] from features ``known``, [T, hidden] in float32."""
        embedded = torch.nn.functional.embedding(tokens, self._embedding)
        normed = self._hidden_norm(known)
        both = torch.cat((self._input_norm(embedded), normed), dim=-1)
        heads = self._heads + self._kv_heads
        qkv = self._qkv(both).view(-1, heads + self._kv_heads, self._head_dim)
        self._rotary.rotate_(qkv[:, :heads], self._rotary.rows(at))
        attended = self._attention.attend(0, qkv)
        if not len(sampled):
            return self._last.new_empty(0, self._vocab_size)
        x = normed.float() if self._norm_before_residual else known
        x = (x + self._output(attended))[sampled]
        self._last = x + self._mlp(self._mlp_norm(x))
        own = self._head(self._norm(self._last)).float()
        logits = own.new_full((len(sampled), self._vocab_size), _NEVER)
        logits[:, self._ids] = own
        return logits
