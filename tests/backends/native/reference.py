"""A Llama-shaped decoder in float64 numpy, written from the definitions, and tiny random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import variants
from paceline.checkpoints.model.checkpoint import expected_shapes
from paceline.checkpoints.model.config import ModelConfig, RopeConfig

Weights = dict[str, NDArray[np.float32]]


def levels() -> list[Any]:
    """The kernels' levels for ``parametrize``: the best one, and others in ``make test-thorough``.

    Products and attention are tested on all of them every day.
    """
    best, others = variants()[:1], variants()[1:]
    return [*best, *(pytest.param(level, marks=pytest.mark.thorough) for level in others)]


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": 150,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_word_embeddings": True,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def random_weights(config: ModelConfig, seed: int) -> Weights:
    random = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            values = random.uniform(0.5, 1.5, shape)
        elif name.endswith(".bias"):
            values = random.normal(0, 0.3, shape)
        elif "embed" in name:
            values = random.normal(0, 1, shape)
        else:
            values = random.normal(0, shape[-1] ** -0.5, shape)
        weights[name] = values.astype(np.float32)
    return weights


def rope_tables(
    config: ModelConfig, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    half = config.head_dim // 2
    inverse = config.rope.theta ** (-np.arange(half) / half)
    angles = np.arange(positions)[:, None] * inverse
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rms(x: NDArray[np.float64], weight: NDArray[np.float32], eps: float) -> NDArray[np.float64]:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attend(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    window: int | None,
    softcap: float | None = None,
) -> NDArray[np.float64]:
    """q [N, heads, dim], of the last N positions; k, v [T, kv_heads, dim] -> [N, heads * dim]."""
    count, heads, dim = q.shape
    total, kv_heads = k.shape[:2]
    out = np.empty_like(q)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = capped(q[:, head] @ k[:, kv].T / np.sqrt(dim), softcap)
        for row in range(count):
            position = total - count + row
            scores[row, position + 1 :] = -np.inf
            if window is not None:
                scores[row, : max(0, position - window + 1)] = -np.inf
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = probabilities / probabilities.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(count, heads * dim)


def capped(x: NDArray[np.float64], softcap: float | None) -> NDArray[np.float64]:
    return x if softcap is None else softcap * np.tanh(x / softcap)


def rotate(
    x: NDArray[np.float64], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float64]:
    """x [T, heads, dim], cos and sin [T, dim / 2]."""
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def expert_shares(config: ModelConfig, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the output of each expert is multiplied by, [T, experts]; 0: a row does not go there."""
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    others = np.argsort(-scores, axis=-1)[:, config.experts_per_token :]
    np.put_along_axis(shares, others, 0.0, axis=-1)
    if config.normalise_experts:
        shares /= shares.sum(-1, keepdims=True)
    return shares


def logits(config: ModelConfig, weights: Weights, ids: Sequence[int]) -> NDArray[np.float64]:
    """Logits [T, vocab] of one sequence computed whole."""
    count = len(ids)
    cos, sin = rope_tables(config, count)
    x = weights["model.embed_tokens.weight"][list(ids)].astype(np.float64)

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        y = x @ weights[f"{name}.weight"].T.astype(np.float64)
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def mlp(h: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        gate, up = linear(h, f"{name}.gate_proj"), linear(h, f"{name}.up_proj")
        return linear(gate / (1 + np.exp(-gate)) * up, f"{name}.down_proj")

    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        h = _rms(x, weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        q = linear(h, f"{attention}.q_proj").reshape(count, -1, config.head_dim)
        k = linear(h, f"{attention}.k_proj").reshape(count, -1, config.head_dim)
        v = linear(h, f"{attention}.v_proj").reshape(count, -1, config.head_dim)
        if config.qk_norm:
            q = _rms(q, weights[f"{attention}.q_norm.weight"], config.rms_norm_eps)
            k = _rms(k, weights[f"{attention}.k_norm.weight"], config.rms_norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        window = config.sliding_window if layer in config.sliding_layers else None
        attended = attend(q, k, v, window, config.attention_softcap)
        x = x + linear(attended, f"{attention}.o_proj")
        h = _rms(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        if config.num_experts and layer not in config.dense_layers:
            shares = expert_shares(config, linear(h, f"{prefix}.mlp.router"))
            for expert in range(config.num_experts):
                given = mlp(h, f"{prefix}.mlp.experts.{expert}")
                x = x + shares[:, expert, None] * given
        else:
            x = x + mlp(h, f"{prefix}.mlp")
    x = _rms(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return capped(linear(x, head), config.logits_softcap)
