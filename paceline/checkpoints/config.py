"""The architecture of a decoder, whichever file format described it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; names follow Hugging Face's ``rope_scaling``/``rope_parameters``."""

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
    # longrope: per-dimension factors, head_dim / 2 of each
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # explicit per-dimension divisors from a GGUF's rope_freqs.weight; empty: none
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, rotary GQA attention, gated SiLU MLP."""

    # Hugging Face model_type: "llama", "mistral", "qwen2", "qwen3"
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
    # attend to the last N positions only, in these layers; None: everywhere full
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    # dtype of the stored weights, for "auto": "float32", "bfloat16", "float16", or a GGUF type
    stored_dtype: str = "float32"
