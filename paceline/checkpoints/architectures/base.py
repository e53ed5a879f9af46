"""Description of an architecture: how its files name tensors, and which fields of ModelConfig its
config sets. One module of this package describes one architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from paceline.checkpoints.model.fields import Fields
from paceline.checkpoints.weights.stacked_experts import Stored

__all__ = ["Architecture", "GGUFFields", "Knobs"]

_LAYER: Final = re.compile(r"(model\.layers\.[0-9]+\.)(.+?)(\.weight|\.bias|)")
_EXPERT: Final = re.compile(r"\.experts\.([0-9]+)\.")


# arguments of ModelConfig
Knobs: TypeAlias = Mapping[str, Any]


class GGUFFields(Protocol):
    """Typed access to a GGUF file's metadata; keys omit the architecture. Readers raise
    CheckpointError naming the key."""

    @property
    def layers(self) -> int: ...

    def value(self, key: str, default: float | None = None) -> float:
        """Return a number."""

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number, not below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A kind of decoder. A field that is left out has Llama's value."""

    # model_type in config.json, and the class in its "architectures"
    model_type: str
    class_name: str
    # name for users
    title: str
    # general.architecture of its GGUF files; None: they are not read
    gguf: str | None = None
    # its GGUF files have experts; models with and without may share a name
    gguf_experts: bool = False
    # llama.cpp rotates neighbouring rows, so its converter interleaves those of queries and keys
    gguf_interleaved: bool = False
    # tensor name in a layer of a GGUF file -> name in a Hugging Face folder, or ours
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    # keys that change the arithmetic and that ``gguf_knobs`` reads; see ``gguf.config.NEUTRAL``
    gguf_reads: frozenset[str] = frozenset()
    # arguments of ModelConfig that override those common to all GGUF files
    gguf_knobs: Callable[[GGUFFields], Knobs] = lambda fields: {}
    # defaults of transformers' configuration class, for fields that a config leaves out
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # fields that change the arithmetic and that ``knobs`` reads; see ``hf.config.NEUTRAL``
    reads: frozenset[str] = frozenset()
    # arguments of ModelConfig that override those common to all architectures
    knobs: Callable[[Fields], Knobs] = lambda fields: {}
    # field that names the gate's function, and values that it may have
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    # whether only the first dimensions of a head may be rotated (partial_rotary_factor)
    partial_rotary: bool = False
    # names of rope types that stand for another one of ``config.ROPE_KINDS``
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    # tensor name in a layer of a Hugging Face folder -> ours (``checkpoint``), with * for an
    # expert's number
    renames: Mapping[str, str] = field(default_factory=dict)
    # matrices that hold several of ours, stacked by rows
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # splits tensors that hold all experts, given a folder's tensors by name; None: there are none
    unstacked: Callable[[Mapping[str, Stored]], dict[str, Stored]] | None = None

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Return our names of the parts of a folder's tensor; its own name where it equals ours."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return (name,)
        prefix, part, kind = match.groups()
        # an expert's number is kept
        expert = _EXPERT.search(part)
        number = expert[1] if expert else ""
        part = _EXPERT.sub(".experts.*.", part)
        names = self.fused.get(part) or (self.renames.get(part, part),)
        names = tuple(name.replace("*", number) for name in names)
        return tuple(f"{prefix}{name}{kind}" for name in names)
