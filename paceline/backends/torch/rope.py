"""Rotary position embedding: one table of cosines and sines per model.

Dimension ``i`` of a head's first half is rotated against dimension ``i`` of its second half by
``position * inverse_frequency[i]``.

Two scalings depend on the length of the sequence (dynamic NTK above its original length, longrope's
choice between short and long factors). A cached key was rotated once and for all, and prefix
caching shares it between requests of different lengths, so the length they depend on is the longest
that this engine serves, for every request alike.
"""

from __future__ import annotations

import math

import torch

from paceline.checkpoints.config import ModelConfig, RopeConfig

__all__ = ["RotaryTable", "inverse_frequencies", "longest_sequence"]


def longest_sequence(config: ModelConfig) -> int:
    """How many positions the model can be asked for, with its own scaling of positions."""
    rope = config.rope
    original = rope.original_max_position or config.max_position_embeddings
    if rope.kind in ("dynamic", "yarn"):
        return max(config.max_position_embeddings, int(original * rope.factor))
    return config.max_position_embeddings


def inverse_frequencies(config: ModelConfig, length: int) -> tuple[torch.Tensor, float]:
    """Radians per position for each of ``head_dim / 2`` pairs, and the factor on cosine and sine.

    ``length`` is the longest sequence served. Returns float32 on the CPU.
    """
    rope, dim = config.rope, config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rope.theta**exponents
    attention_factor = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "dynamic":
        original = rope.original_max_position or config.max_position_embeddings
        stretch = rope.factor * max(length, original) / original - (rope.factor - 1)
        frequencies = 1.0 / (rope.theta * stretch ** (dim / (dim - 2))) ** exponents
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies, attention_factor = _yarn(config, frequencies)
    elif rope.kind == "longrope":
        original = rope.original_max_position or config.max_position_embeddings
        factors = rope.long_factor if length > original else rope.short_factor
        frequencies = frequencies / torch.tensor(factors)
        if rope.attention_factor is not None:
            attention_factor = rope.attention_factor
        elif rope.factor > 1.0:
            attention_factor = math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.freq_factors:
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    return frequencies, attention_factor


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """High frequencies stay, low ones are divided by ``factor``, a ramp lies between."""
    assert rope.original_max_position is not None  # checked by RopeConfig
    rotations = rope.original_max_position * frequencies / (2 * math.pi)
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1 - keep)


def _yarn(config: ModelConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """As llama3, but the ramp is linear in the dimension, between two numbers of rotations."""
    rope, dim = config.rope, config.head_dim
    original = rope.original_max_position or config.max_position_embeddings

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            attention_factor = magnitude(1.0)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp), attention_factor


class RotaryTable:
    """Cosines and sines of positions ``[0, length)``, in the model's dtype.

    A row of ``cos`` is [c, c] and of ``sin`` [-s, s], so that with the halves of x swapped the
    rotation is ``x * cos + swap(x) * sin``. Computed in float32, as Hugging Face
    does, then cast.
    """

    def __init__(
        self, config: ModelConfig, length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, factor = inverse_frequencies(config, length)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._half = config.head_dim // 2

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for positions [T]: two tensors [T, 1, head_dim], once per step."""
        return self._cos[positions], self._sin[positions]

    def rotate_(self, heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rotate heads [T, N, head_dim] in place."""
        cos, sin = rows
        swapped = heads.roll(self._half, -1)
        torch.addcmul(heads * cos, swapped, sin, out=heads)
