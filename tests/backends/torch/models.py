"""Tiny random models of every supported architecture, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers

VOCAB: Final = 160

# sizes with nothing in common, so that a swapped dimension shows
_BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


# transformers derives the dimensions of Phi-3's heads from its width
_PHI: Final[dict[str, Any]] = {"head_dim": None, "hidden_size": 96, "pad_token_id": 0}

# transformers ties Gemma's embeddings unless told otherwise; 23 is no head's number of dimensions
_GEMMA: Final[dict[str, Any]] = {
    "query_pre_attn_scalar": 23,
    "sliding_window": 7,
    "pad_token_id": 0,
}

_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}

# name -> (class prefix, settings over _BASE)
ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 6}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", _rope("default") | {"rope_parameters": {"rope_theta": 500.0}}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": (
        "Llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.0,
            mscale_all_dim=0.5,
            beta_fast=16.0,
            beta_slow=2.0,
        ),
    ),
    "llama-longrope": (
        "Llama",
        _rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.1 * i for i in range(8)],
            long_factor=[1.5 + 0.5 * i for i in range(8)],
        ),
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"head_dim": None, "hidden_size": 96}),
    "qwen2-sliding-layers": (
        "Qwen2",
        {
            "head_dim": None,
            "hidden_size": 96,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", _PHI),
    "phi3-sliding": ("Phi3", _PHI | {"sliding_window": 9}),
    "phi3-partial": ("Phi3", _PHI | _rope("default", partial_rotary_factor=0.75)),
    "phi3-longrope": (
        "Phi3",
        _PHI
        | {"original_max_position_embeddings": 128}
        | _rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0 + 0.1 * i for i in range(6)],
            long_factor=[1.5 + 0.5 * i for i in range(6)],
        ),
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
            "logits_scaling": 0.7,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3-windows": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {"hidden_size": 96, "head_dim": None, "pad_token_id": 0}),
    "gemma2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-biases": ("Gemma2", _GEMMA | {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", _GEMMA | {"num_hidden_layers": 7}),
    "gemma3-scaled": (
        "Gemma3Text",
        _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 3, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        _EXPERTS
        | {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "qwen3-moe-sliding": ("Qwen3Moe", _EXPERTS | {"use_sliding_window": True, "sliding_window": 9}),
    # biases and sinks are drawn below, and a limit as low as that cuts
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.6,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
        },
    ),
    "granite-biases": ("Granite", {"attention_bias": True, "mlp_bias": True}),
}


def make_model(name: str, **changes: Any) -> Any:
    """A random model in float32, in eval mode, the same each time."""
    prefix, settings = ARCHITECTURES[name]
    values = {
        key: value for key, value in (_BASE | settings | changes).items() if value is not None
    }
    config = getattr(transformers, f"{prefix}Config")(**values)
    if settings.get("sliding_window", 0) is None:
        config.sliding_window = None
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a missing one
            if parameter.ndim == 1 or key.endswith("_bias"):
                noise = torch.randn(parameter.shape) * 0.3
                # Gemma stores norms' weights less one
                around = 0.0 if key.endswith("bias") or prefix.startswith("Gemma") else 1.0
                parameter.copy_(around + noise)
    return model


def save_model(folder: Path, name: str, **changes: Any) -> Any:
    """Write a random model to ``folder`` and return it."""
    model = make_model(name, **changes)
    model.save_pretrained(folder)
    return model
