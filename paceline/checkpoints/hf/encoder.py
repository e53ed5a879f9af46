"""Encoders of BERT's shape from a Hugging Face folder: BERT, RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from paceline.checkpoints.hf.folder import HFFolder
from paceline.checkpoints.model.encoder import EncoderConfig, EncoderFiles
from paceline.checkpoints.model.fields import Fields
from paceline.checkpoints.weights.safetensors import read_entries, values_of
from paceline.errors import CheckpointError

__all__ = ["ENCODERS", "open_hf_encoder"]

# model_type -> name of the base model in checkpoints with a head
ENCODERS: Final[Mapping[str, str]] = MappingProxyType(
    {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
)
# activation names -> functions
_ACTIVATIONS: Final = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
# transformers' defaults, for fields that a config leaves out
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
_ROBERTA_DEFAULTS: Final[Mapping[str, Any]] = {**_DEFAULTS, "vocab_size": 50265}


def open_hf_encoder(folder: HFFolder) -> EncoderFiles:
    """Open an encoder's folder. Raises CheckpointError where it is malformed."""
    try:
        config = _config_of(folder.config or {})
    except CheckpointError as error:
        raise CheckpointError(f"{folder.path / 'config.json'}: {error}") from None
    prefix = ENCODERS[config.model_type]
    entries = {_our_name(name, prefix): entry for name, entry in read_entries(folder.path).items()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    return EncoderFiles(folder.path, config, shapes, lambda name: values_of(entries[name]))


def _our_name(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    # the first BERT spelt its norms this way
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _config_of(raw: Mapping[str, Any]) -> EncoderConfig:
    model_type = str(raw.get("model_type"))
    if model_type not in ENCODERS:
        raise CheckpointError(
            f"model_type {model_type!r:.40} is not supported as an encoder; these are: "
            f"{', '.join(ENCODERS)}"
        )
    is_bert = model_type == "bert"
    fields = Fields(raw, _DEFAULTS if is_bert else _ROBERTA_DEFAULTS)
    kind = fields.raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise CheckpointError(f"position_embedding_type {kind!r:.40} is not supported")
    activation = fields.raw.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {activation!r:.40} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise CheckpointError(f"{name}=true is not supported: this would be no encoder")
    return EncoderConfig(
        model_type=model_type,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        num_hidden_layers=fields.whole("num_hidden_layers"),
        num_attention_heads=fields.whole("num_attention_heads"),
        intermediate_size=fields.whole("intermediate_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        first_position=0 if is_bert else fields.whole("pad_token_id", 1) + 1,
        type_vocab_size=fields.whole("type_vocab_size"),
        layer_norm_eps=fields.number(fields.raw, "layer_norm_eps"),
        activation=_ACTIVATIONS[activation],
    )
