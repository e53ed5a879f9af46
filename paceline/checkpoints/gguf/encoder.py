"""Encoders of BERT's shape from a GGUF file, as llama.cpp's converter writes BertModel.

Files have no head: the converter leaves the pooler out, and classifiers are not read. The layers'
activation is not written either; it is BERT's, GELU. ::

    token_embd  position_embd  token_types  token_embd_norm
    blk.N.attn_{q,k,v,output}  blk.N.attn_output_norm
    blk.N.ffn_{up,down}        blk.N.layer_output_norm

Sources: the ``gguf`` package's names of ``MODEL_ARCH.BERT``, and ``BertModel`` of llama.cpp's
``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.gguf.container import GGUFFile
from paceline.checkpoints.gguf.data import GGUFData
from paceline.checkpoints.model.encoder import EncoderConfig, EncoderFiles
from paceline.errors import CheckpointError

__all__ = ["GGUF_ENCODERS", "open_gguf_encoder"]

# values of general.architecture
GGUF_ENCODERS: Final = ("bert",)
_PLAIN: Final = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_IN_LAYER: Final = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NAME: Final = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?([a-z_]+)\.(weight|bias)")


def open_gguf_encoder(file: GGUFFile, paths: tuple[Path, ...]) -> EncoderFiles:
    """Open an encoder's file.

    Args:
        file: its header, of all parts where it is split.
        paths: paths of the parts.

    Raises:
        CheckpointError: keys or tensors that are missing or disagree.
    """
    data = GGUFData(paths)
    tensors = {_our_name(name): tensor for name, tensor in file.tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        config = _config_of(file.metadata, shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    return EncoderFiles(file.path, config, shapes, lambda name: data.values(tensors[name]))


def _our_name(name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_PLAIN[part]}.{kind}" if part in _PLAIN else name
    return f"encoder.layer.{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else name


def _config_of(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> EncoderConfig:
    def whole(key: str) -> int:
        value = metadata.get(f"bert.{key}")
        if type(value) is not int:
            raise CheckpointError(f"bert.{key} is {value!r:.40}, must be a whole number")
        return value

    def rows(name: str) -> int:
        shape = shapes.get(name, ())
        if len(shape) != 2:
            raise CheckpointError(f"there is no matrix {name}")
        return shape[0]

    if metadata.get("bert.attention.causal", False):
        raise CheckpointError("bert.attention.causal=True is not supported: this is no encoder")
    epsilon = metadata.get("bert.attention.layer_norm_epsilon")
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise CheckpointError(f"bert.attention.layer_norm_epsilon is {epsilon!r:.40}")
    return EncoderConfig(
        model_type="bert",
        vocab_size=rows("embeddings.word_embeddings.weight"),
        hidden_size=whole("embedding_length"),
        num_hidden_layers=whole("block_count"),
        num_attention_heads=whole("attention.head_count"),
        intermediate_size=whole("feed_forward_length"),
        # the converter cuts off positions before a text's first one
        max_position_embeddings=rows("embeddings.position_embeddings.weight"),
        first_position=0,
        type_vocab_size=rows("embeddings.token_type_embeddings.weight"),
        layer_norm_eps=epsilon,
        activation="gelu",
    )
