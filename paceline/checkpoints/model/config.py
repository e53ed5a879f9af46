"""The architecture of a decoder, for every file format.

Both classes are validated when they are made, because files may contain wrong values: sizes of a
config that exists can be multiplied safely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from paceline.errors import CheckpointError

__all__ = ["ACTIVATIONS", "ROPE_KINDS", "ModelConfig", "RopeConfig"]

ROPE_KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS: Final = ("silu", "gelu_tanh", "clamped_swiglu")
_MOST_POSITIONS: Final = 2**31


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise CheckpointError(message)


def _require_count(name: str, value: int, most: int) -> None:
    _require(
        type(value) is int and 1 <= value <= most,
        f"{name} is {value!r}, must be a whole number from 1 to {most}",
    )


def _require_positive(name: str, value: float) -> None:
    _require(
        isinstance(value, (int, float)) and math.isfinite(value) and value > 0,
        f"{name} is {value!r}, must be positive and finite",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; names follow Hugging Face's ``rope_parameters``."""

    theta: float = 10000.0
    # "default", "linear", "dynamic", "llama3", "yarn" or "longrope"
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # longrope: per-dimension factors, half as many of each as dimensions are rotated
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # explicit per-dimension divisors from a GGUF's rope_freqs.weight; empty: none
    freq_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(
            self.kind in ROPE_KINDS,
            f"rope type {self.kind!r} is not supported; these are: {', '.join(ROPE_KINDS)}",
        )
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            _require_positive(f"rope {name}", getattr(self, name))
        _require(
            self.factor <= _MOST_POSITIONS,
            f"rope factor is {self.factor!r}, must be at most {_MOST_POSITIONS}",
        )
        # yarn's ramp is between logarithms to this base
        _require(
            self.kind != "yarn" or self.theta > 1,
            f"rope theta is {self.theta!r}, must be above 1 for rope type yarn",
        )
        if self.attention_factor is not None:
            _require_positive("rope attention_factor", self.attention_factor)
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            _require(
                value is None or (math.isfinite(value) and value >= 0), f"rope {name} is {value!r}"
            )
        if self.original_max_position is not None:
            _require_count(
                "rope original_max_position", self.original_max_position, _MOST_POSITIONS
            )
        for name in ("short_factor", "long_factor", "freq_factors"):
            for index, value in enumerate(getattr(self, name)):
                _require_positive(f"rope {name}[{index}]", value)
        if self.kind == "llama3":
            _require_positive("rope low_freq_factor", self.low_freq_factor)
            _require(
                math.isfinite(self.high_freq_factor)
                and self.high_freq_factor > self.low_freq_factor,
                f"rope high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}",
            )
        if self.kind in ("llama3", "longrope"):
            _require(
                self.original_max_position is not None,
                f"rope type {self.kind} needs original_max_position_embeddings",
            )
        if self.kind == "longrope":
            _require(
                self.original_max_position != 1,
                "rope type longrope needs original_max_position_embeddings above 1",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary GQA attention, gated MLP. The defaults are Llama's."""

    # Hugging Face model_type, a key of ``architectures.ARCHITECTURES``, or a GGUF's architecture
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    # biases on q, k, v (Qwen2) and on o (Llama with attention_bias)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # RMSNorm over head_dim on queries and keys (Qwen3)
    qk_norm: bool = False
    # one norm over the queries, and one over the keys, of all heads together instead (OLMo 2)
    qk_norm_whole: bool = False
    # norms before attention and MLP; norms on their outputs before these are added to the sum.
    # Llama has the first, OLMo 2 the second, Gemma both
    norms_before: bool = True
    norms_after: bool = False
    # norms multiply by their weight plus this; 1 where files hold the weight minus one (Gemma)
    norm_offset: float = 0.0
    # the gate's function, "silu" or "gelu_tanh"; or "clamped_swiglu", gate * sigmoid(1.702 * gate)
    # * (up + 1), with the gate at most ``swiglu_limit`` and up within +- that (gpt-oss)
    activation: str = "silu"
    swiglu_limit: float = 7.0
    # factors on embeddings, on the outputs of attention and MLP, and on scores (None: head_dim **
    # -0.5), and the divisor of logits (Granite)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0
    # scores and logits x become cap * tanh(x / cap) (Gemma 2)
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    # number of leading dimensions of a head that are rotated; None: all (Phi-4-mini has fewer)
    rotary_dim: int | None = None
    # layers whose queries and keys are not rotated (SmolLM3)
    unrotated_layers: tuple[int, ...] = ()
    # rotary embedding of layers with a sliding window; None: ``rope`` (Gemma 3)
    sliding_rope: RopeConfig | None = None
    # number of positions that these layers attend to; None: all layers attend to all
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    # a score for each head that counts in the softmax's sum and has no value (gpt-oss)
    attention_sinks: bool = False
    # tokens also see later ones, ``sliding_window`` to either side (EmbeddingGemma)
    bidirectional: bool = False
    # experts of a layer's MLP, experts per token, and their width; 0: one MLP for all
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    # weights of a token's experts are divided by their sum
    normalise_experts: bool = False
    router_bias: bool = False
    # layers with one MLP in a model with experts
    dense_layers: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    # dtype of the stored weights, for "auto": "float32", "bfloat16", "float16", or a GGUF type
    stored_dtype: str = "float32"

    def __post_init__(self) -> None:
        _require_count("vocab_size", self.vocab_size, 1 << 24)
        _require_count("hidden_size", self.hidden_size, 1 << 20)
        _require_count("intermediate_size", self.intermediate_size, 1 << 22)
        _require_count("num_hidden_layers", self.num_hidden_layers, 1024)
        _require_count("num_attention_heads", self.num_attention_heads, 4096)
        _require_count("num_key_value_heads", self.num_key_value_heads, 4096)
        _require_count("head_dim", self.head_dim, 4096)
        _require_count("max_position_embeddings", self.max_position_embeddings, _MOST_POSITIONS)
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads={self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={self.num_key_value_heads}",
        )
        _require(
            self.head_dim % 2 == 0, f"head_dim={self.head_dim} is odd; rotary embedding needs pairs"
        )
        _require_positive("rms_norm_eps", self.rms_norm_eps)
        _require(self.rms_norm_eps < 1, f"rms_norm_eps is {self.rms_norm_eps!r}, must be below 1")
        _require(
            self.rotary_dim is None
            or (self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim),
            f"rotary_dim={self.rotary_dim} must be even and 2 to head_dim={self.head_dim}",
        )
        for rope in filter(None, (self.rope, self.sliding_rope)):
            self._check_rope(rope)
        if self.sliding_window is not None:
            _require_count("sliding_window", self.sliding_window, _MOST_POSITIONS)
        for what, layers in (
            ("sliding", self.sliding_layers), ("unrotated", self.unrotated_layers),
        ):  # fmt: skip
            for layer in layers:
                _require(
                    0 <= layer < self.num_hidden_layers,
                    f"{what} layer {layer} of a model with {self.num_hidden_layers} layers",
                )
        for name in ("embedding_scale", "residual_scale", "logits_divisor", "swiglu_limit"):
            _require_positive(name, getattr(self, name))
        for name in ("attention_scale", "attention_softcap", "logits_softcap"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        _require(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}",
        )
        if self.num_experts:
            _require_count("num_experts", self.num_experts, 4096)
            _require_count("experts_per_token", self.experts_per_token, self.num_experts)
            _require_count("expert_intermediate_size", self.expert_intermediate_size, 1 << 22)
        for token_id in self.eos_token_ids:
            _require(
                0 <= token_id < self.vocab_size,
                f"end-of-sequence id {token_id} of a vocabulary of {self.vocab_size}",
            )

    @property
    def rotated(self) -> int:
        """Number of a head's dimensions that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def longest(self) -> int:
        """Number of positions, with the model's own scaling of positions."""
        rope, positions = self.rope, self.max_position_embeddings
        if rope.kind in ("dynamic", "yarn"):
            original = rope.original_max_position or positions
            return max(positions, int(original * rope.factor))
        return positions

    @property
    def scale(self) -> float:
        """The factor on scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def _check_rope(self, rope: RopeConfig) -> None:
        _require(
            rope.kind != "dynamic" or self.rotated > 2,
            f"head_dim={self.head_dim} is too small for rope type dynamic",
        )
        for name in ("short_factor", "long_factor", "freq_factors"):
            factors = getattr(rope, name)
            _require(
                len(factors) in (0, self.rotated // 2),
                f"rope {name} has {len(factors)} entries for head_dim={self.head_dim}; "
                f"must be {self.rotated // 2}",
            )
        if rope.kind == "longrope":
            _require(
                bool(rope.short_factor and rope.long_factor),
                "rope type longrope needs short_factor and long_factor",
            )
