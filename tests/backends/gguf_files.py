"""Models of transformers as GGUF files, as llama.cpp's converter writes them.

Names are the ``gguf`` package's own; keys, the order of rows and the 1 added to Gemma's norms
follow the converter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

# model of tests.backends.torch.models -> architecture, whether rows of q and k are interleaved, and
# changes that make of it what a file can say
FILES: Final[dict[str, tuple[str, bool, dict[str, Any]]]] = {
    "llama": ("llama", True, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen3": ("qwen3", False, {}),
    "phi3": ("phi3", False, {}),
    "phi3-sliding": ("phi3", False, {}),
    "phi3-partial": ("phi3", False, {}),
    "phi3-longrope": ("phi3", False, {}),
    "mixtral": ("llama", True, {}),
    "qwen3-moe": ("qwen3moe", False, {"norm_topk_prob": True}),
    "granite": ("granite", True, {}),
    # the file does not hold the limit
    "gpt-oss": ("gpt-oss", False, {"swiglu_limit": 7.0}),
    "smollm3": ("smollm3", True, {}),
    "olmo2": ("olmo2", False, {}),
    # the file does not hold the scale of scores
    "gemma2": ("gemma2", False, {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", False, {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
}


def write_gguf(path: Path, name: str, model: Any) -> Path:
    """Write a model in float32, without a tokenizer."""
    arch, interleaved, _ = FILES[name]
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _metadata(config, arch).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(
            f"{arch}.{key}", value
        )
    number = next(key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.detach().numpy()
        if arch.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        for part, heads in (
            ("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads),
        ):  # fmt: skip
            if interleaved and part in key:
                values = _interleaved(values, heads)
        if "mlp.experts." in key:
            prefix = f"blk.{key.split('.')[2]}.ffn"
            if arch == "gpt-oss":
                _add_stacked(writer, prefix, key.rpartition(".")[2], values)
            elif key.endswith("gate_up_proj"):
                gate, up = np.split(values, 2, axis=1)
                writer.add_tensor(f"{prefix}_gate_exps.weight", np.ascontiguousarray(gate))
                writer.add_tensor(f"{prefix}_up_exps.weight", np.ascontiguousarray(up))
            else:
                writer.add_tensor(f"{prefix}_down_exps.weight", values)
            continue
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        if key.endswith("sinks"):
            stored += ".weight"
        writer.add_tensor(stored, np.ascontiguousarray(values))
    for kind in ("short", "long"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_stacked(writer: gguf.GGUFWriter, prefix: str, kind: str, values: NDArray[Any]) -> None:
    """gpt-oss: gate and up in turns, outputs last."""
    name, is_bias = kind.removesuffix("_bias"), kind.endswith("_bias")
    rows = values if is_bias else values.swapaxes(1, 2)
    parts = (
        {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if name == "gate_up_proj" else {"down": rows}
    )
    for part, held in parts.items():
        ending = "bias" if is_bias else "weight"
        writer.add_tensor(f"{prefix}_{part}_exps.{ending}", np.ascontiguousarray(held))


def _interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _metadata(config: Any, arch: str) -> dict[str, int | float]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    keys: dict[str, int | float] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if arch in ("phi3", "gemma2", "gemma3", "gpt-oss") and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "phi3":
        keys["rope.dimension_count"] = int(dim * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") == "longrope":
        original = config.original_max_position_embeddings
        factor = config.max_position_embeddings / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(factor) / np.log(original)))
    if (experts := getattr(config, "num_local_experts", 0)) > 0:
        keys["expert_count"] = experts
        keys["expert_used_count"] = config.num_experts_per_tok
        if arch in ("qwen3moe", "gpt-oss"):
            width = getattr(config, "moe_intermediate_size", config.intermediate_size)
            keys["expert_feed_forward_length"] = width
    if arch == "gpt-oss":
        keys["rope.scaling.factor"] = float(rope["factor"])
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch == "granite":
        keys["attention.scale"] = config.attention_multiplier
        keys["embedding_scale"] = config.embedding_multiplier
        keys["residual_scale"] = config.residual_multiplier
        keys["logit_scale"] = config.logits_scaling
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    return keys
