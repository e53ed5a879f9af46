"""A tiny model that stands where a command names one: any length of context, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["CHAT_TEMPLATE", "write_model"]

# longer than any context that the commands ask for
POSITIONS: Final = 262_144
_LAYERS: Final = 2
_HIDDEN: Final = 64
_FEED_FORWARD: Final = 128
# heads are wide, so that the KV pool has few blocks
_HEADS: Final = 4
_HEAD_DIM: Final = 128
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a Llama of two layers with a tokenizer of bytes; return its folder."""
    folder.mkdir()
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    end = len(vocabulary)
    tokenizer = Tokenizer(models.BPE({**vocabulary, "</s>": end}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": _HIDDEN, "intermediate_size": _FEED_FORWARD, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM,
        "vocab_size": end + 1, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "eos_token_id": end, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random, wide = np.random.default_rng(7), _HEADS * _HEAD_DIM
    shapes = {"model.embed_tokens.weight": (end + 1, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{each}_proj.weight": (wide, _HIDDEN) for each in "qkv"}
        shapes |= {f"{at}.self_attn.o_proj.weight": (_HIDDEN, wide)}
        shapes |= {
            f"{at}.mlp.{each}_proj.weight": (_FEED_FORWARD, _HIDDEN) for each in ("gate", "up")
        }
        shapes |= {f"{at}.mlp.down_proj.weight": (_HIDDEN, _FEED_FORWARD)}
        names = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{at}.{each}.weight": (_HIDDEN,) for each in names}
    tensors = {
        name: (random.standard_normal(shape) / 8 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
