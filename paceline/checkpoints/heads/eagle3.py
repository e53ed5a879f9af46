"""EAGLE-3 heads as the hub has them: a decoder layer that reads hidden states of another model.

::

    config.json        a Llama's with one layer, and draft_vocab_size
    fc.weight          [hidden, served hidden for each layer that is read]
    midlayer.*, or layers.0.*, a Llama layer whose attention gets two inputs, concatenated:
      input_layernorm.weight              [hidden], for the token's embedding
      hidden_norm.weight                  [hidden], for the output of fc, or the head's last output
      self_attn.{q,k,v}_proj.weight       [heads * head_dim, 2 * hidden]
    norm.weight        [hidden]
    lm_head.weight     [draft vocab, hidden]
    d2t                [draft vocab]: added to a token's id to get the served model's id
    embed_tokens.weight  [vocab, hidden]; absent: the served model's
    t2d                follows from d2t, and is not read

Layers that are read are counted from the embedding: 2 is the input of layer 2, which is the output
of layer 1. The config's own field counts this way; ``eagle_config`` names the layers whose output
is read.

This module does not know how a head is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.hf.config import config_from
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.json_file import read_json_object
from paceline.checkpoints.weights.safetensors import (
    SafetensorsEntry,
    read_data,
    read_entries,
    values_of,
)
from paceline.errors import CheckpointError

__all__ = ["LAYER", "Eagle3Head", "is_eagle3"]

# name of the layer's tensors here, under either name in the folder
LAYER: Final = "midlayer"
_OTHER_LAYER: Final = "layers.0"
_MAP: Final = "d2t"
_EMBEDDING: Final = "embed_tokens.weight"
# tensors that follow from others, so that they are not read
_IGNORED: Final = frozenset({"t2d"})
_IDS: Final = "eagle_aux_hidden_state_layer_ids"
# most layers that may be read
_MOST_LAYERS: Final = 16
# norms of later versions, which change what is computed
_UNREAD: Final = ("fc_norm", "norm_before_fc", "norm_output", "parallel_drafting")


def is_eagle3(folder: Path) -> bool:
    """Whether a folder's config is an EAGLE-3 head's. Raises CheckpointError if unreadable."""
    raw = read_json_object(folder / "config.json") if folder.is_dir() else None
    if raw is None:
        return False
    names = raw.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw


class Eagle3Head:
    """An opened folder, checked: all tensors exist, with the shapes that its config implies.

    Raises:
        CheckpointError: the folder has no such head.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        raw = read_json_object(folder / "config.json")
        if raw is None:
            raise CheckpointError(f"{folder} has no config.json, so it is no EAGLE-3 head")
        try:
            self._read_config(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
        self._entries = {
            name.replace(_OTHER_LAYER, LAYER, 1) if name.startswith(_OTHER_LAYER) else name: entry
            for name, entry in read_entries(folder).items()
            if name not in _IGNORED
        }
        self._check_tensors()

    def _read_config(self, raw: Mapping[str, Any]) -> None:
        for name in _UNREAD:
            if raw.get(name):
                raise CheckpointError(f"{name}={raw[name]!r:.40} is not supported for EAGLE-3")
        # speculators' format puts the layer's settings into an object of its own
        nested = raw.get("transformer_layer_config")
        layer = dict(raw if nested is None else nested if isinstance(nested, dict) else {})
        draft = raw.get("draft_vocab_size", layer.get("vocab_size"))
        # a Llama, except for the differences in this module's docstring
        layer |= {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": draft,
            "eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": False,
        }  # fmt: skip
        if layer.get("model_type", "llama") != "llama":
            raise CheckpointError(f"model_type {layer['model_type']!r:.40} is no Llama's layer")
        self.config: ModelConfig = config_from(layer, {}).model
        # the sum begins with the normed features; only speculators' format usually has this
        normed = raw.get("norm_before_residual", nested is not None)
        if not isinstance(normed, bool):
            raise CheckpointError(f"norm_before_residual is {normed!r:.40}, must be true or false")
        self.norm_before_residual = normed
        self._layers = _layer_ids(raw)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose input is read, in a served model with ``num_layers`` layers;
        ``num_layers`` itself stands for the last one's output.

        Raises:
            CheckpointError: the served model has too few layers.
        """
        # the first heads read these layers, and no config says so
        found = self._layers or (2, num_layers // 2, num_layers - 3)
        if not all(0 <= layer <= num_layers for layer in found):
            raise CheckpointError(
                f"{self.path} reads what layers {', '.join(map(str, found))} are given, and the "
                f"served model has {num_layers}"
            )
        return found

    @property
    def num_features(self) -> int:
        """Numbers of the served model that are read for each token."""
        return self._entries["fc.weight"].shape[1]

    @property
    def embeds(self) -> int:
        """Number of tokens with embeddings of its own; 0: the served model's are used."""
        entry = self._entries.get(_EMBEDDING)
        return 0 if entry is None else entry.shape[0]

    @property
    def num_values(self) -> int:
        """Number of values in all its tensors."""
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as a fresh array."""
        return values_of(self._entries[name])

    def has(self, name: str) -> bool:
        return name in self._entries

    def token_ids(self) -> NDArray[np.int64]:
        """Return the served model's id of each token that may be drafted."""
        own = np.arange(self.config.vocab_size, dtype=np.int64)
        entry = self._entries.get(_MAP)
        if entry is None:
            return own
        ids: NDArray[np.int64] = own + np.frombuffer(read_data(entry), dtype="<i8")
        return ids

    def _check_tensors(self) -> None:
        config, hidden = self.config, self.config.hidden_size
        fused = self._entries.get("fc.weight")
        if fused is None or len(fused.shape) != 2:
            raise CheckpointError(f"{self.path} has no matrix fc.weight, so it is no EAGLE-3 head")
        heads = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        inner = config.intermediate_size
        matrices = {
            "self_attn.q_proj": (heads, 2 * hidden, config.qkv_bias),
            "self_attn.k_proj": (keys, 2 * hidden, config.qkv_bias),
            "self_attn.v_proj": (keys, 2 * hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, heads, config.o_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, fused.shape[1]),
            "norm.weight": (hidden,),
            "lm_head.weight": (config.vocab_size, hidden),
            **{
                f"{LAYER}.{name}.weight": (hidden,)
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            },
        }
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{LAYER}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{LAYER}.{name}.bias"] = (rows,)
        for name, shape in shapes.items():
            self._check(name, shape)
        if _MAP in self._entries:
            self._check(_MAP, (config.vocab_size,), "I64")
        if _EMBEDDING in self._entries:
            self._check(_EMBEDDING, (self.embeds, hidden))
        extra = self._entries.keys() - shapes - {_MAP, _EMBEDDING}
        if extra:
            raise CheckpointError(
                f"{self.path}: {len(extra)} tensors that an EAGLE-3 head does not have, e.g. "
                f"{', '.join(sorted(extra)[:3])}"
            )

    def _check(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> None:
        entry: SafetensorsEntry | None = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}, which an EAGLE-3 head needs")
        if entry.shape != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(entry.shape)}, its config implies "
                f"{list(shape)}"
            )
        if dtype is not None and entry.dtype != dtype:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {entry.dtype}, must be {dtype}"
            )


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers by whose input is read; () where the config names none."""
    nested = raw.get("eagle_config")
    given, later = raw.get(_IDS), 0
    if given is None and isinstance(nested, dict):
        given, later = nested.get(_IDS), 1
    if given is None:
        return ()
    is_list = isinstance(given, list) and 0 < len(given) <= _MOST_LAYERS
    if not is_list or not all(type(layer) is int and layer >= 0 for layer in given):
        raise CheckpointError(f"{_IDS} is {given!r:.80}, must be a list of layers")
    return tuple(layer + later for layer in given)
