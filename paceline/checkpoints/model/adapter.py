"""LoRA adapters, for every file format: y += scale * B (A x) for some matrices of a decoder.

A reader (``heads.peft``, ``gguf.adapter``) gives the pairs that a file holds, by layer and module;
``AdapterFile.of`` checks them against the model. Values are read later, by ``AdapterFile.read``.

This module does not know names in files, or how an adapter is computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError

__all__ = ["MODULES", "AdapterFile", "AdapterPair", "AdapterValues", "module_shapes"]

# modules that adapters add to, in the order in which backends number them
MODULES: Final = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
# most ranks of one module
MOST_RANK: Final = 4096
Values: TypeAlias = NDArray[np.float32]


def module_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of the modules that an adapter may add to in a layer."""
    hidden, attended = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = [(attended, hidden), (keys, hidden), (keys, hidden), (hidden, attended)]
    if not config.num_experts or layer in config.dense_layers:
        inner = config.intermediate_size
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return dict(zip(MODULES, shapes, strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPair:
    """A and B of one module of one layer."""

    layer: int
    # one of MODULES
    module: str
    # names of A and B in the file
    names: tuple[str, str]
    # [rank, inputs] and [outputs, rank]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    # factor on B A
    scale: float
    # read A and B, fresh arrays, with B's rows in the model's order
    read: Callable[[], tuple[Values, Values]]

    @property
    def rank(self) -> int:
        return self.shapes[0][0] if self.shapes[0] else 0


@dataclass(frozen=True, slots=True, eq=False)
class AdapterValues:
    """An adapter's contents in memory, checked."""

    # SHA-256 of all that changes what it computes: equal for equal contents under any name
    digest: str
    # pair, A, B
    pairs: tuple[tuple[AdapterPair, Values, Values], ...]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFile:
    """An opened adapter whose header fits the model; make one with ``of``."""

    path: Path
    pairs: tuple[AdapterPair, ...]
    # remarks for users, such as the base model that the file names
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: Path,
        config: ModelConfig,
        pairs: Mapping[tuple[int, str], AdapterPair],
        *,
        max_rank: int | None = None,
        notes: tuple[str, ...] = (),
        pause: Callable[[], None] = lambda: None,
    ) -> AdapterFile:
        """Check pairs against the model, and call ``pause`` after each. Raises CheckpointError
        naming a tensor that does not fit.

        Args:
            max_rank: most ranks of a module; None: any number.
        """
        if not pairs:
            raise CheckpointError(f"{path} holds no tensors of an adapter, so it would do nothing")
        most = min(MOST_RANK, max_rank or MOST_RANK)
        for (layer, module), pair in pairs.items():
            shapes = module_shapes(config, layer) if layer < config.num_hidden_layers else {}
            if module not in shapes:
                raise CheckpointError(
                    f"{path}: {pair.names[0]} is of no matrix that the model has "
                    f"({config.num_hidden_layers} layers)"
                )
            outputs, inputs = shapes[module]
            if not 1 <= pair.rank <= most:
                raise CheckpointError(
                    f"{path}: {pair.names[0]} has rank {pair.rank}, must be 1 to {most}"
                )
            for name, shape, wanted in zip(
                pair.names, pair.shapes, ((pair.rank, inputs), (outputs, pair.rank)), strict=True
            ):
                if shape != wanted:
                    raise CheckpointError(
                        f"{path}: {name} has shape {list(shape)}, the model needs {list(wanted)}"
                    )
            if not math.isfinite(pair.scale):
                raise CheckpointError(f"{path}: {pair.names[0]} has the scale {pair.scale}")
            pause()
        ordered = sorted(pairs.items(), key=lambda item: (item[0][0], MODULES.index(item[0][1])))
        return cls(path, tuple(pair for _, pair in ordered), notes)

    @property
    def max_rank(self) -> int:
        """Most ranks of a module."""
        return max(pair.rank for pair in self.pairs)

    @property
    def num_values(self) -> int:
        """Values of all matrices, which is also the number of products for each row."""
        return sum(math.prod(shape) for pair in self.pairs for shape in pair.shapes)

    def read(self, pause: Callable[[], None] = lambda: None) -> AdapterValues:
        """Read everything, and call ``pause`` after each pair. Raises CheckpointError for values
        that are not finite, or if all of B is zero, so that the adapter would do nothing."""
        digest, pairs, changes = hashlib.sha256(), [], False
        for pair, a, b in self._values():
            for name, values in zip(pair.names, (a, b), strict=True):
                if not np.isfinite(values).all():
                    raise CheckpointError(f"{self.path}: {name} holds values that are not finite")
            changes = changes or bool(b.any())
            about = f"{pair.layer} {pair.module} {pair.shapes} {pair.scale!r}\0"
            digest.update(about.encode())
            digest.update(a.data)
            digest.update(b.data)
            pairs.append((pair, a, b))
            pause()
        if not changes:
            raise CheckpointError(
                f"{self.path}: {self.pairs[0].names[1]} and every other B hold zeros alone, so the "
                "adapter would do nothing"
            )
        return AdapterValues(digest.hexdigest(), tuple(pairs))

    def _values(self) -> Iterator[tuple[AdapterPair, Values, Values]]:
        for pair in self.pairs:
            a, b = pair.read()
            yield pair, np.ascontiguousarray(a), np.ascontiguousarray(b)
