"""What an architecture says of itself: how its files name things, and which knobs of ModelConfig
its config sets. One module of this package describes one architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from paceline.checkpoints.hf_fields import Fields
from paceline.checkpoints.stacked import Stored

__all__ = ["Architecture", "GGUFFields"]

_LAYER: Final = re.compile(r"(model\.layers\.[0-9]+\.)(.+?)(\.weight|\.bias|)")
_EXPERT: Final = re.compile(r"\.experts\.([0-9]+)\.")


def _no_knobs(fields: Fields) -> Mapping[str, Any]:
    return {}


class GGUFFields(Protocol):
    """Typed access to a GGUF file's metadata; keys go without the architecture. Readers raise
    CheckpointError naming the key."""

    @property
    def layers(self) -> int: ...

    def value(self, key: str, default: float | None = None) -> float:
        """A number."""
        ...

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, not below 0."""
        ...


def _no_gguf_knobs(fields: GGUFFields) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A kind of decoder. What it leaves out is as in Llama."""

    # model_type in config.json, and the class in its "architectures"
    model_type: str
    class_name: str
    # what people call it
    title: str
    # general.architecture of its GGUF files; None: these are not read
    gguf: str | None = None
    # these have experts; a name may stand for files with and without
    gguf_experts: bool = False
    # llama.cpp rotates neighbouring rows, so its converter interleaved those of queries and keys
    gguf_interleaved: bool = False
    # a tensor's name in a layer of a GGUF file -> in a Hugging Face folder, or ours
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    # keys that change the arithmetic and that ``gguf_knobs`` reads; see ``gguf_config.NEUTRAL``
    gguf_reads: frozenset[str] = frozenset()
    # arguments of ModelConfig, over those that all GGUF files share
    gguf_knobs: Callable[[GGUFFields], Mapping[str, Any]] = _no_gguf_knobs
    # the defaults of transformers' configuration class, for fields that a config leaves out
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # fields that change the arithmetic and that ``knobs`` reads; see ``hf_config.NEUTRAL``
    reads: frozenset[str] = frozenset()
    # arguments of ModelConfig, over those that all architectures share
    knobs: Callable[[Fields], Mapping[str, Any]] = _no_knobs
    # the field that names the gate's function, and what the function may be called
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    # only the first dimensions of a head may be rotated (partial_rotary_factor)
    partial_rotary: bool = False
    # names of rope types that mean another one of ``config.ROPE_KINDS``
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    # a tensor's name in a layer of a Hugging Face folder -> ours (``shapes``), with * for the
    # number of an expert
    renames: Mapping[str, str] = field(default_factory=dict)
    # a matrix that holds several of ours, one below the other
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of a folder's tensors by name, those that hold all experts taken apart; None: there are none
    unstacked: Callable[[Mapping[str, Stored]], dict[str, Stored]] | None = None

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Our names of what a folder's tensor holds; its own where it is called as we call it."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return (name,)
        prefix, part, kind = match.groups()
        # an expert's number goes through as it is
        expert = _EXPERT.search(part)
        number = expert[1] if expert else ""
        part = _EXPERT.sub(".experts.*.", part)
        names = self.fused.get(part) or (self.renames.get(part, part),)
        names = tuple(name.replace("*", number) for name in names)
        return tuple(f"{prefix}{name}{kind}" for name in names)
