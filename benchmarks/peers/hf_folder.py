"""A GGUF model as a Hugging Face folder, for engines that read nothing else.

Weights are dequantised and rounded to bfloat16, so they are not exactly the file's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import serialize_file

from benchmarks.peers.base import Unavailable
from paceline.checkpoints.config import ModelConfig
from paceline.checkpoints.gguf import GGUFCheckpoint
from paceline.checkpoints.gguf_tokenizer import build_tokenizer

__all__ = ["bfloat16_bits", "write_hf_folder"]


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of finite values, ties to even, as its bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


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
        name: {
            "dtype": "bfloat16",
            "shape": list(checkpoint.tensor_shape(name)),
            "data": bfloat16_bits(checkpoint.tensor(name)).tobytes(),
        }
        for name in checkpoint.tensor_names()
    }
    serialize_file(tensors, str(partial / "model.safetensors"), {"format": "pt"})
    partial.rename(folder)
