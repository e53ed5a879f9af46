"""A GGUF model as a Hugging Face folder, for engines that read only those.

Weights are dequantised and rounded to bfloat16, so they are not exactly the file's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.processes import Unavailable
from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.gguf.tokenizer import build_tokenizer
from paceline.checkpoints.model.config import ModelConfig

__all__ = ["write_hf_folder", "write_int8_folder"]

# W8A8 of compressed-tensors: a scale per output, activations rounded per token
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip


def _hf_config(config: ModelConfig, eos: int) -> dict[str, Any]:
    if config.model_type != "llama" or config.rope.kind != "default" or config.sliding_layers:
        raise Unavailable(
            f"a {config.model_type} model with {config.rope.kind} rotary embedding is not written "
            "as a Hugging Face folder: only plain llama is"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }


def write_hf_folder(model: Path, folder: Path) -> None:
    """Write the folder once; a folder that is there is complete.

    Raises Unavailable for architectures other than plain llama.
    """
    if folder.is_dir():
        return
    checkpoint = open_gguf(model)
    metadata = checkpoint.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    eos = int(metadata["tokenizer.ggml.eos_token_id"])
    config = _hf_config(checkpoint.config, eos)
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    build_tokenizer(metadata).save(str(partial / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[eos],
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": checkpoint.config.max_position_embeddings,
    }
    (partial / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    tensors = {
        name: torch.from_numpy(checkpoint.tensor(name)).to(torch.bfloat16)
        for name in checkpoint.tensor_names()
    }
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    partial.rename(folder)


def write_int8_folder(source: Path, folder: Path) -> None:
    """Write a folder of ``write_hf_folder`` with the layers' matrices in int8, once: each output's
    largest value is 127 steps. Embeddings and head stay as they are."""
    if folder.is_dir():
        return
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    config = json.loads((partial / "config.json").read_text())
    (partial / "config.json").write_text(
        json.dumps(config | {"quantization_config": _W8A8}, indent=1)
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(partial / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        values = tensor.float()
        scale = (values.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        tensors[name] = (values / scale).round().to(torch.int8)
        tensors[name + "_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    partial.rename(folder)
