"""Rotary position embedding: radians per position, and tables of cosines and sines.

Dimension ``i`` of a head's first half is rotated against dimension ``i`` of its second half by
``position * inverse_frequency[i]``.

Two scalings depend on the length of the sequence (dynamic NTK above its original length, longrope's
choice between short and long factors). A cached key keeps the rotation it was stored with, and
prefix caching shares it between requests of different lengths, so both use the longest sequence
that this engine serves, for every request.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.model.config import ModelConfig, RopeConfig

__all__ = ["inverse_frequencies", "rotary_tables"]

Floats = NDArray[np.float32]

# positions whose angles are computed at once
_PART: Final = 16_384


def _rounded(values: NDArray[np.float64]) -> Floats:
    return values.astype(np.float32)


def _power(base: float, exponents: Floats) -> Floats:
    """Return the powers, computed in float64 and rounded once, so that every machine has the same.
    Float32 powers differ by an ulp between machines: radians, at the end of a long context."""
    return _rounded(np.float64(np.float32(base)) ** exponents.astype(np.float64))


def rotary_tables(
    config: ModelConfig, length: int, rope: RopeConfig | None = None
) -> tuple[Floats, Floats]:
    """Return cosines and sines of positions ``[0, length)``, each [length, head_dim / 2], with the
    factor that long contexts apply to both. Pairs that are not rotated (``shapes.row_order``) have
    cosine 1 and sine 0.

    ``rope`` is the embedding of some layers; None: ``config.rope``.

    Angles are rounded to float32 as in Hugging Face's code; results are rounded once, see
    ``_power``.
    """
    frequencies, factor = inverse_frequencies(config, length, rope)
    scale = np.float32(factor)
    rotated = len(frequencies)
    cos, sin = np.empty((2, length, config.head_dim // 2), dtype=np.float32)
    cos[:, rotated:], sin[:, rotated:] = 1.0, 0.0
    # in parts: angles in float64 take as much memory as both tables
    for begin in range(0, length, _PART):
        part = slice(begin, min(begin + _PART, length))
        positions = np.arange(part.start, part.stop, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cos[part, :rotated] = _rounded(np.cos(angles)) * scale
        sin[part, :rotated] = _rounded(np.sin(angles)) * scale
    return cos, sin


def inverse_frequencies(
    config: ModelConfig, length: int, rope: RopeConfig | None = None
) -> tuple[Floats, float]:
    """Return the radians per position of each rotated pair, half as many as ``config.rotated``, and
    the factor on cosine and sine.

    ``length`` is the longest sequence served; ``rope`` as for ``rotary_tables``.
    """
    rope, dim = rope or config.rope, config.rotated
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies: Floats = np.float32(1.0) / _power(rope.theta, exponents)
    attention_factor = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "dynamic":
        original = rope.original_max_position or config.max_position_embeddings
        stretch = rope.factor * max(length, original) / original - (rope.factor - 1)
        theta = rope.theta * stretch ** (dim / (dim - 2))
        frequencies = np.float32(1.0) / _power(theta, exponents)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies, attention_factor = _yarn(config, rope, frequencies)
    elif rope.kind == "longrope":
        original = rope.original_max_position or config.max_position_embeddings
        factors = rope.long_factor if length > original else rope.short_factor
        frequencies = np.divide(frequencies, factors, dtype=np.float32)
        if rope.attention_factor is not None:
            attention_factor = rope.attention_factor
        elif rope.factor > 1.0:
            attention_factor = math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.freq_factors:
        frequencies = np.divide(frequencies, rope.freq_factors, dtype=np.float32)
    return frequencies, attention_factor


def _llama3(rope: RopeConfig, frequencies: Floats) -> Floats:
    """Keep high frequencies, divide low ones by ``factor``, and interpolate between them."""
    assert rope.original_max_position is not None  # checked by RopeConfig
    rotations = rope.original_max_position * frequencies / (2 * math.pi)
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep: Floats = np.clip(ramp, 0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1 - keep)


def _yarn(config: ModelConfig, rope: RopeConfig, frequencies: Floats) -> tuple[Floats, float]:
    """Scale as llama3 does, but interpolate by dimension, between two numbers of rotations."""
    dim = config.rotated
    original = rope.original_max_position or config.max_position_embeddings

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            attention_factor = magnitude(1.0)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp), attention_factor
