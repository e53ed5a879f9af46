"""Configuration of the compiled library, from a model's shape and the formats chosen for it."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64
from dataclasses import dataclass
from typing import Final

from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError

__all__ = ["DTYPES", "KV_DTYPES", "NativeConfig", "NativeSettings", "unsupported_reason"]

# weights: float32; bfloat16; int8 with a scale per output and activations in 8 bits with a scale
# per token; 4-bit groups of 32 (scale and minimum)
DTYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2, "q4": 3}
# int8: a scale per token and head
KV_DTYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
_TILE: Final = 16
_MAX_HEAD_DIM: Final = 256
# PacelineConfig.activation
_ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
# range in which float32 divides by a soft cap without loss; models have about 50
_SOFTCAPS: Final = (1e-6, 1e6)
# matrices of a layer that have a kind
_KINDS: Final = 6


# fields of ModelConfig that the kernels support at these values alone, and names of the others
_ONLY: Final[tuple[tuple[str, object, str], ...]] = (
    ("bidirectional", False, "attention to both sides"),
)


def unsupported_reason(config: ModelConfig, block_size: int) -> str | None:
    """Return why a model of this shape cannot run natively, or None if it can."""
    lacking = [what for name, value, what in _ONLY if getattr(config, name) != value]
    if lacking:
        return f"{config.model_type} has {', '.join(lacking)}, which the native kernels do not have"
    for cap in (config.attention_softcap, config.logits_softcap):
        if cap is not None and not _SOFTCAPS[0] <= cap <= _SOFTCAPS[1]:
            return f"a soft cap of {cap:g} is not from {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}"
    if config.residual_scale != 1.0 and not config.norms_before:
        return f"{config.model_type} scales what it adds to a sum that is not normed"
    if config.head_dim % _TILE or config.head_dim > _MAX_HEAD_DIM:
        return (
            f"head_dim={config.head_dim} is not a multiple of {_TILE} up to {_MAX_HEAD_DIM}, "
            "which the native attention needs"
        )
    if block_size < 1 or block_size % _TILE:
        return f"block_size={block_size} is not a multiple of {_TILE}, the native cache's tile"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """Formats and sizes in which a model is computed."""

    # a key of ``DTYPES``
    dtype: str
    num_blocks: int
    # a key of ``KV_DTYPES``; None: float32 for float32 weights, else bfloat16
    kv_dtype: str | None = None
    block_size: int = _TILE
    # None: as ``cpu.choose_threads`` chooses
    threads: int | None = None
    # a name of ``variants()``; None: the best
    isa: str | None = None
    # a number for each matrix (``block_formats.Kinds``); empty: all have ``dtype``, except tables
    # and odd widths, which are int8 where it is "q4"
    kinds: bytes = b""
    # False: hidden states are wanted, and there is no head
    has_head: bool = True
    # blocks behind the others, only for layers with a sliding window; 0: these use the others
    num_window_blocks: int = 0


class NativeConfig(ctypes.Structure):
    """Mirror of PacelineConfig."""

    _fields_ = (
        ("layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("vocab", c_int64),
        ("max_positions", c_int64),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("num_window_blocks", c_int64),
        ("sliding_window", c_int64),
        ("experts", c_int64),
        ("experts_per_token", c_int64),
        ("expert_inner", c_int64),
        ("tied", c_int32),
        ("qk_norm", c_int32),
        ("qkv_bias", c_int32),
        ("o_bias", c_int32),
        ("mlp_bias", c_int32),
        ("weights", c_int32),
        ("headless", c_int32),
        ("kv", c_int32),
        ("threads", c_int32),
        ("norms", c_int32),
        ("qk_norm_whole", c_int32),
        ("activation", c_int32),
        ("normalise_experts", c_int32),
        ("router_bias", c_int32),
        ("sinks", c_int32),
        ("eps", c_float),
        ("sum_eps", c_float),
        ("embedding_scale", c_float),
        ("attention_scale", c_float),
        ("swiglu_limit", c_float),
        ("attention_softcap", c_float),
        ("logits_softcap", c_float),
        ("ropes", c_char_p),
        ("sliding", c_char_p),
        ("dense", c_char_p),
        ("kinds", c_char_p),
        ("isa", c_char_p),
    )

    @classmethod
    def of(cls, model: ModelConfig, settings: NativeSettings) -> NativeConfig:
        """Return the configuration, without what rotary tables and machine decide: the positions
        and the number of threads. Raises ConfigError for what the library does not have."""
        if settings.dtype not in DTYPES:
            raise ConfigError(f"dtype {settings.dtype!r} is not one of {', '.join(DTYPES)}")
        kv_dtype = settings.kv_dtype
        if kv_dtype is None:
            kv_dtype = "float32" if settings.dtype == "float32" else "bfloat16"
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
        reason = unsupported_reason(model, settings.block_size)
        if reason is not None:
            raise ConfigError(reason)
        wanted = model.num_hidden_layers * _KINDS + 2
        if settings.kinds and len(settings.kinds) != wanted:
            raise ConfigError(f"{len(settings.kinds)} kinds of matrices, expected {wanted}")
        layers = range(model.num_hidden_layers)
        ropes = [1] * len(layers)
        if model.sliding_rope is not None:
            for layer in model.sliding_layers:
                ropes[layer] = 2
        for layer in model.unrotated_layers:
            ropes[layer] = 0
        return cls(
            layers=len(layers),
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            inner=model.intermediate_size,
            vocab=model.vocab_size,
            # a number beyond 64 bits is refused for its size, and must not wrap around
            num_blocks=min(settings.num_blocks, 2**63 - 1),
            block_size=settings.block_size,
            num_window_blocks=min(settings.num_window_blocks, 2**63 - 1),
            sliding_window=(model.sliding_window or 0) if model.sliding_layers else 0,
            experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            expert_inner=model.expert_intermediate_size,
            tied=model.tie_word_embeddings,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
            o_bias=model.o_bias,
            mlp_bias=model.mlp_bias,
            weights=DTYPES[settings.dtype],
            headless=not settings.has_head,
            kv=KV_DTYPES[kv_dtype],
            norms=1 * model.norms_before + 2 * model.norms_after,
            qk_norm_whole=model.qk_norm_whole,
            activation=_ACTIVATIONS[model.activation],
            normalise_experts=model.normalise_experts,
            router_bias=model.router_bias,
            sinks=model.attention_sinks,
            eps=model.rms_norm_eps,
            # The sum of all layers is kept divided by the factor on each layer's addend. Its norm
            # is unchanged with this epsilon, and nothing else reads the sum.
            sum_eps=model.rms_norm_eps / model.residual_scale**2,
            embedding_scale=model.embedding_scale / model.residual_scale,
            attention_scale=model.attention_scale or 0.0,
            swiglu_limit=model.swiglu_limit,
            attention_softcap=model.attention_softcap or 0.0,
            logits_softcap=model.logits_softcap or 0.0,
            ropes=bytes(ropes),
            sliding=bytes(layer in model.sliding_layers for layer in layers),
            dense=bytes(layer in model.dense_layers for layer in layers),
            kinds=settings.kinds or None,
            isa=None if settings.isa is None else settings.isa.encode(),
        )
