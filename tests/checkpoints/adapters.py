"""Random adapters for tests, written as ``peft`` and llama.cpp write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from paceline.checkpoints.model.adapter import MODULES, module_shapes
from paceline.checkpoints.model.config import ModelConfig

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
Pairs = dict[tuple[int, str], Pair]
_GGUF_NAMES = dict(
    zip(
        MODULES,
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        strict=True,
    )
)


def random_pairs(
    config: ModelConfig, rank: int = 4, seed: int = 0, modules: Sequence[str] = MODULES
) -> Pairs:
    """A and B of an adapter that changes results clearly; values that bfloat16 holds."""
    random, pairs = np.random.default_rng(seed), {}

    def some(*shape: int) -> NDArray[np.float32]:
        values = random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    for layer in range(config.num_hidden_layers):
        shapes = module_shapes(config, layer)
        for module in filter(shapes.__contains__, modules):
            outputs, inputs = shapes[module]
            pairs[layer, module] = some(rank, inputs), some(outputs, rank)
    return pairs


def tensors_of(pairs: Pairs, prefix: str = "base_model.model.model.") -> dict[str, Any]:
    """The tensors of a folder by name."""
    return {
        f"{prefix}layers.{layer}.{module}.lora_{which}.weight": np.ascontiguousarray(values)
        for (layer, module), pair in pairs.items()
        for which, values in zip("AB", pair, strict=True)
    }


def write_peft(
    folder: Path, pairs: Pairs, tensors: Mapping[str, Any] | None = None, **fields: Any
) -> Path:
    """Write a folder. Fields of the config replace the usual ones; None takes one out."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = min((a.shape[0] for a, _ in pairs.values()), default=1)
    config: dict[str, Any] = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0.05, "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for _, module in pairs}),
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False, "rank_pattern": {},
        "alpha_pattern": {}, "fan_in_fan_out": False, "modules_to_save": None,
        "base_model_name_or_path": "someone/base", "init_lora_weights": True,
        "trainable_token_indices": None, "layer_replication": None, "use_qalora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(
        dict(tensors_of(pairs) if tensors is None else tensors),
        folder / "adapter_model.safetensors",
    )
    return folder


def write_gguf_adapter(
    path: Path, config: ModelConfig, pairs: Pairs, alpha: float | None = None, **keys: str
) -> Path:
    """Write a file of the architecture "llama", whose queries and keys are interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    kept = {"general.type": "adapter", "adapter.type": "lora"} | keys
    for key, value in kept.items():
        writer.add_string(key, value)
    rank = next(iter(pairs.values()))[0].shape[0]
    writer.add_float32("adapter.lora.alpha", float(rank if alpha is None else alpha))
    for (layer, module), (a, b) in pairs.items():
        heads = {
            MODULES[0]: config.num_attention_heads,
            MODULES[1]: config.num_key_value_heads,
        }.get(module)
        rows = b
        if heads is not None:
            halves = b.reshape(heads, 2, config.head_dim // 2, -1)
            rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(b.shape)
        name = f"blk.{layer}.{_GGUF_NAMES[module]}.weight"
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
