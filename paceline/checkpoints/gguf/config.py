"""A GGUF file's metadata as a ModelConfig, and the values at which other keys change nothing."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.architectures import ARCHITECTURES, Architecture
from paceline.checkpoints.gguf.container import GGUFFile, GGUFTensor
from paceline.checkpoints.model.config import ModelConfig, RopeConfig
from paceline.checkpoints.model.fields import gguf_special_id
from paceline.errors import CheckpointError

__all__ = ["NEUTRAL", "SUPPORTED_ARCHITECTURES", "GGUFConfigReader", "find_architecture"]

# "llama" covers Llama 1 to 3.x, Mistral 7B, SmolLM and SmolLM2
SUPPORTED_ARCHITECTURES: Final = tuple(
    dict.fromkeys(item.gguf for item in ARCHITECTURES.values() if item.gguf is not None)
)

# keys, without their architecture, that change the arithmetic, and the values at which they do not:
# see ``hf.config.NEUTRAL``
NEUTRAL: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.max_alibi_bias": 0.0,
        "attention.scale": 0.0,
        "attention.sliding_window_pattern": None,
        "attention.temperature_scale": 0.0,
        "attn_logit_softcapping": 0.0,
        "embedding_scale": 0.0,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.0,
        "final_logit_softcapping": 0.0,
        "logit_scale": 0.0,
        "residual_scale": 0.0,
        "use_parallel_residual": False,
    }
)
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def find_architecture(metadata: Mapping[str, Any]) -> Architecture | None:
    """Find the architecture by name and by whether there are experts; None: none matches."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return None
    experts = metadata.get(f"{name}.expert_count", 0)
    sparse = isinstance(experts, int) and experts > 0
    # "llama" includes Mistral, whose files are alike
    found = [item for item in ARCHITECTURES.values() if item.gguf == name]
    fitting = [item for item in found if item.gguf_experts == sparse]
    return next(iter(fitting or found), None)


class GGUFConfigReader:
    """Reader of metadata into ModelConfig that checks every value's type.

    Args:
        tensors: tensors by our names.
        values: reads a tensor's values.
        architecture: result of ``find_architecture``.
    """

    def __init__(
        self,
        file: GGUFFile,
        tensors: Mapping[str, GGUFTensor],
        values: Callable[[GGUFTensor], NDArray[np.float32]],
        architecture: Architecture | None,
    ) -> None:
        self.architecture = architecture
        self.metadata = file.metadata
        self.tensors = tensors
        self.values = values
        self.arch = ""
        self.layers = 0

    def read(self) -> ModelConfig:
        self.arch = self.text("general.architecture", "")
        architecture = self.architecture
        if architecture is None:
            raise CheckpointError(
                f"architecture {self.arch!r} is not supported; "
                f"these are: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        experts = self.whole(f"{self.arch}.expert_count", 0)
        if experts > 0 and not architecture.gguf_experts:
            raise CheckpointError(f"a mixture of {experts} experts is not supported")

        for key, neutral in NEUTRAL.items():
            value = self.metadata.get(f"{self.arch}.{key}", neutral)
            if value != neutral and key not in architecture.gguf_reads:
                raise CheckpointError(f"{self.arch}.{key}={value!r:.40} is not supported")

        heads = self.whole_of_layers("attention.head_count")
        hidden = self.whole(f"{self.arch}.embedding_length")
        head_dim = self.head_dim(hidden, heads)
        layers = self.whole(f"{self.arch}.block_count")
        if layers > (most := len(self.tensors)):
            raise CheckpointError(f"{self.arch}.block_count is {layers}, but {most} tensors exist")
        context = self.whole(f"{self.arch}.context_length")
        vocab = self.vocab_size()
        window = self.whole(f"{self.arch}.attention.sliding_window", 0)
        self.layers = layers if layers <= 1024 else 0
        shared: dict[str, Any] = {
            "model_type": architecture.model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": self.whole_of_layers("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.whole_of_layers("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rotary_dim": self.rotary_dim(head_dim, architecture.partial_rotary),
            "max_position_embeddings": context,
            "rms_norm_eps": self.number(f"{self.arch}.attention.layer_norm_rms_epsilon"),
            "rope": self.rope(context),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "o_bias": "model.layers.0.self_attn.o_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "sliding_window": window or None,
            "sliding_layers": tuple(range(layers)) if window and layers <= 1024 else (),
            "eos_token_ids": self.eos_token_ids(vocab),
            "bos_token_id": gguf_special_id(self.metadata, "bos", vocab),
            "stored_dtype": self.stored_dtype(),
        }
        return ModelConfig(**(shared | dict(architecture.gguf_knobs(self))))

    def head_dim(self, hidden: int, heads: int) -> int:
        if heads < 1:
            raise CheckpointError(f"{self.arch}.attention.head_count is {heads}")
        key_length = self.whole(f"{self.arch}.attention.key_length", 0)
        if not key_length and hidden % heads:
            raise CheckpointError(
                f"embedding_length={hidden} is not a multiple of head_count={heads}, and there is "
                "no attention.key_length"
            )
        head_dim = key_length or hidden // heads
        self.check_dimensions("attention.value_length", head_dim)
        return head_dim

    def check_dimensions(self, key: str, head_dim: int) -> None:
        value = self.whole(f"{self.arch}.{key}", head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{self.arch}.{key} is {value}, but heads have {head_dim} dimensions; "
                "other values are not supported"
            )

    def rotary_dim(self, head_dim: int, partial: bool) -> int | None:
        """Return the number of rotated dimensions; None: all."""
        if not partial:
            self.check_dimensions("rope.dimension_count", head_dim)
            return None
        dimensions = self.count("rope.dimension_count", head_dim)
        return None if dimensions == head_dim else dimensions

    def value(self, key: str, default: float | None = None) -> float:
        return self.number(f"{self.arch}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        return self.whole(f"{self.arch}.{key}", default)

    def vocab_size(self) -> int:
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError("there is no tensor token_embd.weight")
        rows = embedding.shape[0]
        if (stated := self.whole(f"{self.arch}.vocab_size", rows)) != rows:
            raise CheckpointError(f"{self.arch}.vocab_size is {stated}, token_embd has {rows} rows")
        for name in ("tokens", "scores", "token_type"):
            entries = self.metadata.get(f"tokenizer.ggml.{name}")
            if entries is None:
                continue
            if not isinstance(entries, (list, array)) or len(entries) != rows:
                found = len(entries) if isinstance(entries, (list, array)) else repr(entries)
                raise CheckpointError(
                    f"tokenizer.ggml.{name} has {found} entries, token_embd has {rows} rows"
                )
        return rows

    def rope(self, context: int) -> RopeConfig:
        prefix = f"{self.arch}.rope"
        kind = self.text(f"{prefix}.scaling.type", "none")
        factor = self.number(f"{prefix}.scaling.factor", 1.0)
        if (linear := self.number(f"{prefix}.scale_linear", 0.0)) and kind == "none":
            kind, factor = "linear", linear
        short, long = (
            self.rope_factors(f"rope_factors_{name}.weight") for name in ("short", "long")
        )
        if kind == "none" and (short or long):
            # Phi-3's files give no other hint
            kind = "longrope"
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise CheckpointError(f"{prefix}.scaling.type {kind!r} is not supported")
        attention_factor = None
        if f"{prefix}.scaling.attn_factor" in self.metadata:
            attention_factor = self.number(f"{prefix}.scaling.attn_factor")
            if kind == "yarn" and factor > 1:
                # llama.cpp multiplies it onto yarn's own factor, Hugging Face's code replaces that
                attention_factor *= 0.1 * math.log(factor) + 1.0
        original = self.whole(f"{prefix}.scaling.original_context_length", 0) or None
        return RopeConfig(
            theta=self.number(f"{prefix}.freq_base", 10000.0),
            kind="default" if kind == "none" else kind,
            factor=factor if kind != "none" else 1.0,
            original_max_position=original or (context if kind in ("yarn", "longrope") else None),
            attention_factor=attention_factor,
            beta_fast=self.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
            freq_factors=self.rope_factors("rope_freqs.weight"),
            short_factor=short,
            long_factor=long,
        )

    def rope_factors(self, name: str) -> tuple[float, ...]:
        tensor = self.tensors.get(name)
        if tensor is None:
            return ()
        if len(tensor.shape) != 1 or tensor.shape[0] > 4096:
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, must be a vector")
        return tuple(float(value) for value in self.values(tensor))

    def eos_token_ids(self, vocab: int) -> frozenset[int]:
        ids = {name: gguf_special_id(self.metadata, name, vocab) for name in ("eos", "eot", "eom")}
        if ids["eos"] is None and "tokenizer.ggml.eos_token_id" in self.metadata:
            found = self.metadata["tokenizer.ggml.eos_token_id"]
            raise CheckpointError(
                f"tokenizer.ggml.eos_token_id is {found}, the vocabulary has {vocab} entries: "
                "answers would never end"
            )
        return frozenset(token_id for token_id in ids.values() if token_id is not None)

    def stored_dtype(self) -> str:
        """Return the type that holds most bytes of the layers' matrices."""
        sizes: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            if len(tensor.shape) > 1 and name.startswith("model.layers."):
                sizes[tensor.type.name] += tensor.num_bytes
        if not sizes:
            raise CheckpointError("there are no layers")
        name = sizes.most_common(1)[0][0]
        return _DTYPES.get(name, name)

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{key} is {value!r}, must be a string")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int:
            found = "missing" if value is None else f"{value!r:.80}"
            raise CheckpointError(f"{key} is {found}, must be a whole number")
        if value < 0:
            raise CheckpointError(f"{key} is {value}, must not be negative")
        return value

    def whole_of_layers(self, name: str, default: int | None = None) -> int:
        """Return a number that newer writers may store once per layer; all must agree."""
        key = f"{self.arch}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, array):
            unique = set(value)
            if len(unique) != 1:
                raise CheckpointError(
                    f"{key} differs between layers ({len(unique)} values), not supported"
                )
            value = unique.pop()
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{key} is {value!r}, must be a whole number")
            return value
        return self.whole(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or value is None:
            found = "missing" if value is None else f"{value!r:.80}"
            raise CheckpointError(f"{key} is {found}, must be a number")
        return float(value)
