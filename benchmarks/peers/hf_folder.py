"""A GGUF model as a Hugging Face folder, for engines that read nothing else.

Weights are dequantised and rounded to bfloat16, so they are not exactly the file's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.processes import Unavailable
from paceline.checkpoints.config import ModelConfig
from paceline.checkpoints.gguf import GGUFCheckpoint
from paceline.checkpoints.gguf_tokenizer import build_tokenizer

__all__ = ["write_hf_folder"]


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
    """Write it once; a folder that is there is complete.

    Raises Unavailable for architectures other than plain llama.
    """
    if folder.is_dir():
        return
    checkpoint = GGUFCheckpoint(model)
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
