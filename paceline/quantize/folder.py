"""A folder of safetensors as the GGUF file that is written of it.

What is written is read back before any work begins: the keys by the reader of GGUF files, whose
config must be the folder's, and the vocabulary by its tokenizer (``vocabulary``). A folder whose
config or tokenizer would come back as another one is refused, and so are architectures that have
not been tried.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from paceline.backends.runner.rope import inverse_frequencies, rotary_tables
from paceline.checkpoints.architectures import ARCHITECTURES
from paceline.checkpoints.gguf.checkpoint import stored_name, stored_rows
from paceline.checkpoints.gguf.config import GGUFConfigReader
from paceline.checkpoints.gguf.container import GGUFFile, GGUFTensor, GGUFType
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.config import ModelConfig, RopeConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.source import Field, StoredTensor
from paceline.quantize.vocabulary import vocabulary_fields

__all__ = ["WRITTEN", "FolderSource"]

_T = TypeVar("_T", bound=np.generic)

# model types whose folders are written; tests compare what is read back with the folder
WRITTEN: Final = (
    "granite", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
_ROPE_FACTORS: Final = "rope_freqs.weight"
_TYPES: Final = {"F16": GGUFType.F16, "BF16": GGUFType.BF16}
# rotary embeddings that keys or factors can hold
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_VALUE_KINDS: Final = {
    bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}  # fmt: skip
# fields of the config that the file need not say: they follow from the tensors, or the tokenizer
# holds them
_NOT_COMPARED: Final = ("bos_token_id", "eos_token_ids", "model_type", "rope", "stored_dtype")
# positions whose rotations are compared
_POSITIONS: Final = 4096


class FolderSource:
    """A folder of safetensors in 16 or 32 bits.

    Raises ConfigError where it cannot be written as a GGUF file.
    """

    def __init__(self, checkpoint: HFCheckpoint) -> None:
        self.checkpoint = checkpoint
        config = checkpoint.config
        if config.model_type not in WRITTEN:
            raise ConfigError(
                f"{checkpoint.path}: a folder of {config.model_type} cannot be written as GGUF, "
                f"only {', '.join(WRITTEN)}; start from a GGUF file in 16 bits"
            )
        if checkpoint.quantisation:
            raise ConfigError(
                f"{checkpoint.path}: its matrices are in fewer than 16 bits already "
                f"({checkpoint.quantisation}); start from the model in 16 bits"
            )
        self._known = ARCHITECTURES[config.model_type]
        self.architecture = str(self._known.gguf)
        self._keys = _config_keys(config, self.architecture)
        self._rope_factors = _rope_factors(config)
        self._tensors = self._name_tensors()
        self._vocabulary = vocabulary_fields(checkpoint.path, config)
        self._check_config()

    def files(self) -> Sequence[Path]:
        # what is written may lie in the folder, too
        return sorted(
            path
            for path in self.checkpoint.path.iterdir()
            if path.suffix in (".jinja", ".json", ".safetensors") and path.is_file()
        )

    def fields(self) -> Iterator[Field]:
        yield Field("general.type", "model", GGUFValueType.STRING)
        yield Field("general.name", self.checkpoint.path.resolve().name, GGUFValueType.STRING)
        for name, value in self._keys.items():
            yield Field(name, value, _VALUE_KINDS[type(value)])
        yield from self._vocabulary

    def tensors(self) -> Sequence[StoredTensor]:
        return self._tensors

    def stored_rows(self, name: str, rows: NDArray[_T]) -> NDArray[_T]:
        interleaved = self._known.gguf_interleaved
        return stored_rows(self.checkpoint.config, interleaved, name, rows)

    def stored_bytes(self, tensor: StoredTensor) -> NDArray[Any]:
        if tensor.name == _ROPE_FACTORS:
            return np.array(self._rope_factors, dtype=np.float32)
        parts = [self._values(name, tensor.type) for name in tensor.parts]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _values(self, name: str, kind: GGUFType) -> NDArray[Any]:
        if kind in _TYPES.values():
            return self.stored_rows(name, self.checkpoint.raw_tensor(name)[0])
        return self.stored_rows(name, self.checkpoint.tensor(name))

    def _name_tensors(self) -> list[StoredTensor]:
        """Return the tensors of the file; the matrices of all experts are one."""
        grouped: dict[str, list[str]] = {}
        try:
            for name in self.checkpoint.tensor_names():
                grouped.setdefault(stored_name(self._known, name), []).append(name)
        except CheckpointError as error:
            raise ConfigError(f"{self.checkpoint.path}: {error}") from None
        found = []
        if self._rope_factors:
            count = len(self._rope_factors)
            found.append(StoredTensor(_ROPE_FACTORS, (count,), GGUFType.F32, ()))
        for stored, names in grouped.items():
            shape = self.checkpoint.tensor_shape(names[0])
            if ".experts." in names[0]:
                shape = (len(names), *shape)
            # llama.cpp adds and multiplies vectors in float32 alone, and so it does with routers
            matrix = len(shape) > 1 and ".router." not in names[0]
            kind = _TYPES.get(self.checkpoint.tensor_type(names[0])) if matrix else None
            found.append(StoredTensor(stored, shape, kind or GGUFType.F32, tuple(names)))
        return found

    def _check_config(self) -> None:
        """Raise ConfigError where the file's config would be read as another one."""
        config = self.checkpoint.config
        metadata = {**self._keys, "general.architecture": self.architecture}
        metadata |= {field.name: _as_read(field) for field in self._vocabulary}
        tensors = {
            (tensor.parts[0] if tensor.parts else tensor.name): GGUFTensor(
                tensor.name, tensor.shape, tensor.type, 0, math.prod(tensor.shape)
            )
            for tensor in self._tensors
        }
        file = GGUFFile(self.checkpoint.path, 3, metadata, {})
        reader = GGUFConfigReader(
            file,
            tensors,
            lambda tensor: np.array(self._rope_factors, dtype=np.float32),
            self._known,
        )
        try:
            read = reader.read()
        except CheckpointError as error:
            raise ConfigError(
                f"{self.checkpoint.path}: cannot be written as GGUF: {error}"
            ) from None
        ours, theirs = asdict(config), asdict(read)
        for name in ours:
            if name not in _NOT_COMPARED and not _same(ours[name], theirs[name]):
                raise ConfigError(
                    f"{self.checkpoint.path}: cannot be written as GGUF, which has no key for "
                    f"{name}={ours[name]!r:.80} of {config.model_type}: {theirs[name]!r:.80} would "
                    "be read"
                )
        # the dynamic kind is the plain one up to the model's own context
        length = min(_POSITIONS, config.max_position_embeddings)
        kept = config.rope.kind in _ROPE_KINDS
        for one, other in zip(
            rotary_tables(config, length), rotary_tables(read, length), strict=True
        ):
            if not kept or not np.allclose(one, other, rtol=0, atol=1e-3):
                raise ConfigError(
                    f"{self.checkpoint.path}: cannot be written as GGUF, which does not hold its "
                    f"rotary embedding of type {config.rope.kind}"
                )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # keys hold 32 bits
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _as_read(field: Field) -> Any:
    """Return a value as the reader of GGUF files returns it."""
    if field.inner == GGUFValueType.INT32:
        return array("i", field.value)
    if field.inner == GGUFValueType.FLOAT32:
        return array("f", field.value)
    return field.value


def _config_keys(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the keys of a config, but not those of the tokenizer."""
    experts = config.num_experts > 0
    # Mixtral's file has no other key for the width of its experts
    width = config.intermediate_size
    if experts and architecture == "llama":
        width = config.expert_intermediate_size
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        **_rope_keys(config.rope),
    }
    if config.sliding_window is not None and config.sliding_layers:
        keys["attention.sliding_window"] = config.sliding_window
    if experts:
        keys["expert_count"] = config.num_experts
        keys["expert_used_count"] = config.experts_per_token
        if architecture != "llama":
            keys["expert_feed_forward_length"] = config.expert_intermediate_size
    factors = {
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": config.logits_divisor,
    }
    keys |= {name: float(value) for name, value in factors.items() if value != 1.0}
    if config.attention_scale is not None:
        keys["attention.scale"] = float(config.attention_scale)
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.freq_base": float(rope.theta)}
    if rope.kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope.kind
        keys["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "yarn" and rope.original_max_position:
        keys["rope.scaling.original_context_length"] = rope.original_max_position
    return keys


def _rope_factors(config: ModelConfig) -> tuple[float, ...]:
    """Return what frequencies are divided by, which a file has instead of Llama 3's own formula."""
    if config.rope.kind != "llama3":
        return ()
    plain = RopeConfig(theta=config.rope.theta)
    before, _ = inverse_frequencies(config, 1, plain)
    after, _ = inverse_frequencies(config, 1)
    return tuple(float(value) for value in before / after)
